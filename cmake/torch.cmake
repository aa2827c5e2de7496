# Finds a LibTorch tree (an installed torch wheel or the LibTorch zip) and makes poise::torch.
# torch's own config is not used: it fails without a CUDA toolkit and asks nvcc for retired
# architectures. Search order: POISE_TORCH_ROOT, CMAKE_PREFIX_PATH, the python on the PATH.
set(POISE_TORCH_MIN "2.11.0")
set(POISE_TORCH_MAX "2.12.0") # first version that is not accepted

set(POISE_TORCH_ROOT "" CACHE PATH "LibTorch tree: the folder that holds include/ and lib/")

function(_poise_find_torch_root out)
  if(POISE_TORCH_ROOT)
    set(${out} "${POISE_TORCH_ROOT}" PARENT_SCOPE)
    return()
  endif()
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH)
    foreach(candidate IN ITEMS "${prefix}" "${prefix}/torch" "${prefix}/../..")
      if(EXISTS "${candidate}/include/torch/headeronly/version.h")
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
  if(_poise_python)
    execute_process(
      COMMAND "${_poise_python}" -c
        "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    set(${out} "${found}" PARENT_SCOPE)
  endif()
endfunction()

_poise_find_torch_root(POISE_TORCH_DIR)
if(NOT EXISTS "${POISE_TORCH_DIR}/include/torch/headeronly/version.h")
  message(FATAL_ERROR
    "[build] no LibTorch found (looked in POISE_TORCH_ROOT, CMAKE_PREFIX_PATH and the python on the PATH); "
    "install torch ${POISE_TORCH_MIN} or pass -DPOISE_TORCH_ROOT=<folder with include/ and lib/>")
endif()

file(STRINGS "${POISE_TORCH_DIR}/include/torch/headeronly/version.h" _version_line REGEX "\"[0-9]+\\.[0-9]+\\.[0-9]+")
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" POISE_TORCH_VERSION "${_version_line}")
if(POISE_TORCH_VERSION VERSION_LESS POISE_TORCH_MIN OR NOT POISE_TORCH_VERSION VERSION_LESS POISE_TORCH_MAX)
  message(FATAL_ERROR
    "[build] torch ${POISE_TORCH_VERSION} found at ${POISE_TORCH_DIR}: poise ${PROJECT_VERSION} needs "
    ">= ${POISE_TORCH_MIN}, < ${POISE_TORCH_MAX}; install torch ${POISE_TORCH_MIN} or choose another tree with -DPOISE_TORCH_ROOT")
endif()
message(STATUS "poise: torch ${POISE_TORCH_VERSION} at ${POISE_TORCH_DIR}")

add_library(poise_torch INTERFACE)
add_library(poise::torch ALIAS poise_torch)
target_include_directories(poise_torch SYSTEM INTERFACE
  $<BUILD_INTERFACE:${POISE_TORCH_DIR}/include>
  $<BUILD_INTERFACE:${POISE_TORCH_DIR}/include/torch/csrc/api/include>)
target_compile_definitions(poise_torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
# Whole link lines instead of imported targets: torch registers kernels from libraries that nothing refers to.
target_link_options(poise_torch INTERFACE -Wl,--allow-shlib-undefined)
target_link_libraries(poise_torch INTERFACE
  $<BUILD_INTERFACE:-Wl,--no-as-needed>
  $<BUILD_INTERFACE:${POISE_TORCH_DIR}/lib/libtorch.so>
  $<BUILD_INTERFACE:${POISE_TORCH_DIR}/lib/libtorch_cpu.so>
  $<BUILD_INTERFACE:${POISE_TORCH_DIR}/lib/libc10.so>
  $<BUILD_INTERFACE:-Wl,--as-needed>)
