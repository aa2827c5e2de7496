# Flags for our own code only; consumers of the library see none of them.
add_library(poise_flags INTERFACE)
target_compile_features(poise_flags INTERFACE cxx_std_20)
target_compile_options(poise_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wno-unused-parameter -fvisibility=hidden -fvisibility-inlines-hidden>
  # Same bits everywhere: no fused multiply-add unless it is written.
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
if(POISE_DEVELOPER)
  target_compile_options(poise_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Werror>)
endif()
option(POISE_SANITIZE "Build with AddressSanitizer and UndefinedBehaviorSanitizer" OFF)
if(POISE_SANITIZE)
  # Not vptr: it asks for type information that torch's libraries keep to themselves.
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize=vptr>
                      $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer>)
  add_link_options(-fsanitize=address,undefined)
endif()
find_program(POISE_CCACHE ccache)
if(POISE_CCACHE AND PROJECT_IS_TOP_LEVEL)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_COMMAND}" -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime "${POISE_CCACHE}")
  if(POISE_WITH_CUDA)
    set(CMAKE_CUDA_COMPILER_LAUNCHER "${POISE_CCACHE}")
  endif()
endif()
