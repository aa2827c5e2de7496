# Decides whether the CUDA kernels are compiled: POISE_WITH_CUDA. Otherwise the no_cuda twins are.
set(POISE_WITH_CUDA OFF)
if(NOT POISE_CUDA STREQUAL "OFF")
  # Only where the user points: a toolkit that merely lies around is not taken.
  find_program(POISE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
    NO_CMAKE_SYSTEM_PATH)
  if(POISE_NVCC AND EXISTS "${POISE_TORCH_DIR}/lib/libtorch_cuda.so")
    set(POISE_WITH_CUDA ON)
  elseif(POISE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "[build] POISE_CUDA=ON needs nvcc (found: '${POISE_NVCC}') and a CUDA build of torch "
      "(${POISE_TORCH_DIR}/lib/libtorch_cuda.so); install both or pass -DPOISE_CUDA=OFF")
  endif()
endif()

if(POISE_WITH_CUDA)
  set(CMAKE_CUDA_COMPILER "${POISE_NVCC}")
  # Set here: torch's default list holds architectures that nvcc 13 no longer knows.
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 75-real 80-real 90-real 100)
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  set(CMAKE_CUDA_STANDARD 17)
endif()
message(STATUS "poise: CUDA kernels ${POISE_WITH_CUDA}")
