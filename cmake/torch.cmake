# Finds a LibTorch tree (an installed torch wheel or the LibTorch zip) and makes poise::torch.
# torch's own config is not used: it fails without a CUDA toolkit and asks nvcc for retired
# architectures. Search order: POISE_TORCH_ROOT, CMAKE_PREFIX_PATH, the python on the PATH.
# Installed beside poiseConfig.cmake, so that a consumer finds torch the same way. Sets
# POISE_TORCH_DIR and POISE_TORCH_VERSION, or POISE_TORCH_PROBLEM: the includer decides how loud.
set(POISE_TORCH_MIN "2.11.0")
set(POISE_TORCH_MAX "2.12.0") # first version that is not accepted

set(POISE_TORCH_ROOT "" CACHE PATH "LibTorch tree: the folder that holds include/ and lib/")

# Where the version is written: torch 2.10 moved it.
function(_poise_torch_version_header root out)
  foreach(header IN ITEMS torch/headeronly/version.h torch/csrc/api/include/torch/version.h)
    if(EXISTS "${root}/include/${header}")
      set(${out} "${root}/include/${header}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${out} "" PARENT_SCOPE)
endfunction()

function(_poise_find_torch_root out)
  if(POISE_TORCH_ROOT)
    set(${out} "${POISE_TORCH_ROOT}" PARENT_SCOPE)
    return()
  endif()
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH)
    foreach(candidate IN ITEMS "${prefix}" "${prefix}/torch" "${prefix}/../..")
      _poise_torch_version_header("${candidate}" header)
      if(header)
        get_filename_component(candidate "${candidate}" REALPATH)
        set(${out} "${candidate}" PARENT_SCOPE)
        return()
      endif()
    endforeach()
  endforeach()
  # Found without importing it: an import costs seconds and may fail on a machine without a driver.
  find_program(_poise_python NAMES python3 python)
  if(Python_EXECUTABLE)
    set(_poise_python "${Python_EXECUTABLE}")
  endif()
  set(found "")
  if(_poise_python)
    execute_process(
      COMMAND "${_poise_python}" -c
        "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

_poise_find_torch_root(POISE_TORCH_DIR)
_poise_torch_version_header("${POISE_TORCH_DIR}" _poise_version_header)
set(POISE_TORCH_VERSION "")
set(POISE_TORCH_PROBLEM "")
if(_poise_version_header)
  file(STRINGS "${_poise_version_header}" _poise_version_line REGEX "\"[0-9]+\\.[0-9]+\\.[0-9]+")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" POISE_TORCH_VERSION "${_poise_version_line}")
endif()
if(NOT POISE_TORCH_VERSION)
  string(CONCAT POISE_TORCH_PROBLEM
    "[build] no LibTorch found (looked in POISE_TORCH_ROOT '${POISE_TORCH_ROOT}', CMAKE_PREFIX_PATH and the "
    "python on the PATH); install torch ${POISE_TORCH_MIN} or pass -DPOISE_TORCH_ROOT=<folder with include/ and lib/>")
elseif(POISE_TORCH_VERSION VERSION_LESS POISE_TORCH_MIN OR NOT POISE_TORCH_VERSION VERSION_LESS POISE_TORCH_MAX)
  string(CONCAT POISE_TORCH_PROBLEM
    "[build] torch ${POISE_TORCH_VERSION} found at ${POISE_TORCH_DIR}: poise needs "
    ">= ${POISE_TORCH_MIN}, < ${POISE_TORCH_MAX}; install torch ${POISE_TORCH_MIN} or choose another tree "
    "with -DPOISE_TORCH_ROOT")
endif()

if(NOT POISE_TORCH_PROBLEM AND NOT TARGET poise_torch)
  add_library(poise_torch INTERFACE)
  add_library(poise::torch ALIAS poise_torch)
  target_include_directories(poise_torch SYSTEM INTERFACE
    "${POISE_TORCH_DIR}/include" "${POISE_TORCH_DIR}/include/torch/csrc/api/include")
  target_compile_definitions(poise_torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
  # Whole link lines instead of imported targets: torch registers kernels from libraries that nothing
  # refers to.
  target_link_options(poise_torch INTERFACE -Wl,--allow-shlib-undefined)
  target_link_libraries(poise_torch INTERFACE
    -Wl,--no-as-needed
    "${POISE_TORCH_DIR}/lib/libtorch.so"
    "${POISE_TORCH_DIR}/lib/libtorch_cpu.so"
    "${POISE_TORCH_DIR}/lib/libc10.so"
    -Wl,--as-needed)
endif()
