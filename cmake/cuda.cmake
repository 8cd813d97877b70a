# Finds nvcc and CUTLASS, or says what to install. A build never goes without CUDA by surprise: only where there is no
# nvcc, or where PYQUANT_CUDA=OFF asks for it. Sets
#   PYQUANT_HAVE_CUDA   ON: CUDA is enabled as a language
#   PYQUANT_WHY_NO_CUDA  why it is OFF, in words; the library repeats them where a GPU is asked for
#   PYQUANT_CUTLASS_INCLUDE
set(PYQUANT_NVCC_MINIMUM 12.1)      # kernels with more than 4 KiB of parameters (of experts); 13.0 is what is tested
set(PYQUANT_CUTLASS_MINIMUM 4.2)
set(PYQUANT_CUTLASS_INCLUDE "${PYQUANT_CUTLASS_ROOT}/include")
set(PYQUANT_HAVE_CUDA OFF)
set(PYQUANT_WHY_NO_CUDA "")
set_property(CACHE PYQUANT_CUDA PROPERTY STRINGS AUTO ON OFF)

# The version that pyproject.toml pins, for the command to print.
function(pyquant_cutlass_requirement result)
  file(STRINGS "${CMAKE_CURRENT_SOURCE_DIR}/pyproject.toml" text REGEX "nvidia-cutlass==")
  string(REGEX MATCH "nvidia-cutlass==[0-9.]+" requirement "${text}")
  set(${result} "${requirement}" PARENT_SCOPE)
endfunction()

function(pyquant_check_cutlass)
  pyquant_cutlass_requirement(requirement)
  set(header "${PYQUANT_CUTLASS_INCLUDE}/cutlass/version.h")
  if(NOT EXISTS "${header}")
    message(FATAL_ERROR
      "pyquant: nvcc is here (${CMAKE_CUDA_COMPILER}), but CUTLASS's headers are not (looked for ${header}).\n"
      "Install them:            pip install --no-deps ${requirement}\n"
      "or name their folder:    PYQUANT_CUTLASS_ROOT=DIR, which holds include/cutlass\n"
      "or build for CPUs only:  PYQUANT_CUDA=OFF")
  endif()
  file(STRINGS "${header}" lines REGEX "#define CUTLASS_(MAJOR|MINOR) ")
  string(REGEX REPLACE "[^0-9]*([0-9]+);[^0-9]*([0-9]+).*" "\\1.\\2" version "${lines}")
  if(version VERSION_LESS PYQUANT_CUTLASS_MINIMUM)
    message(FATAL_ERROR "pyquant: CUTLASS ${version} (${header}) is too old, ${PYQUANT_CUTLASS_MINIMUM} is needed: "
      "pip install --no-deps ${requirement}")
  endif()
endfunction()

# nvcc from CMAKE_CUDA_COMPILER, CUDACXX, PATH, or where a toolkit usually lies; PYQUANT_NVCC= (empty) hides it.
function(pyquant_find_nvcc)
  if(CMAKE_CUDA_COMPILER)
    return()
  endif()
  if(DEFINED ENV{CUDACXX} AND NOT DEFINED CACHE{PYQUANT_NVCC})
    set(PYQUANT_NVCC "$ENV{CUDACXX}" CACHE FILEPATH "nvcc")
  endif()
  find_program(PYQUANT_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(PYQUANT_NVCC)
    set(CMAKE_CUDA_COMPILER "${PYQUANT_NVCC}" PARENT_SCOPE)
  endif()
endfunction()

if(NOT PYQUANT_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "PYQUANT_CUDA: '${PYQUANT_CUDA}'; allowed: AUTO, ON, OFF")
endif()
pyquant_find_nvcc()
if(PYQUANT_CUDA STREQUAL "OFF")
  set(PYQUANT_WHY_NO_CUDA "PYQUANT_CUDA=OFF was set when pyquant was built")
elseif(NOT CMAKE_CUDA_COMPILER)
  set(PYQUANT_WHY_NO_CUDA "there was no nvcc when pyquant was built")
  if(PYQUANT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "PYQUANT_CUDA=ON, but there is no nvcc in PATH, CUDA_HOME, CUDA_PATH or /usr/local/cuda; "
      "name it with CUDACXX")
  endif()
else()
  pyquant_check_cutlass()
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  enable_language(CUDA)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS PYQUANT_NVCC_MINIMUM)
    message(FATAL_ERROR "pyquant: nvcc ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER}) is too old, "
      "${PYQUANT_NVCC_MINIMUM} is needed; install a newer toolkit, or build for CPUs only: PYQUANT_CUDA=OFF")
  endif()
  find_package(CUDAToolkit REQUIRED)
  set(PYQUANT_HAVE_CUDA ON)
endif()
