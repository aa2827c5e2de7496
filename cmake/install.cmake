# cmake --install: headers, library, program, and the package that find_package(poise) reads.
# torch is not part of it: the consumer's own is found by the same cmake/torch.cmake.
include(CMakePackageConfigHelpers)
set(_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/poise")

set_target_properties(poise PROPERTIES INSTALL_RPATH "${POISE_TORCH_DIR}/lib")
install(TARGETS poise EXPORT poise
  LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
if(TARGET poise_cli)
  set_target_properties(poise_cli PROPERTIES
    INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${POISE_TORCH_DIR}/lib")
  install(TARGETS poise_cli RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()
install(DIRECTORY include/poise "${PROJECT_BINARY_DIR}/generated/poise" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h")

install(EXPORT poise NAMESPACE poise:: FILE poiseTargets.cmake DESTINATION "${_package_dir}")
configure_package_config_file(cmake/poiseConfig.cmake.in "${PROJECT_BINARY_DIR}/poiseConfig.cmake"
  INSTALL_DESTINATION "${_package_dir}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/poiseConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES
  "${PROJECT_BINARY_DIR}/poiseConfig.cmake"
  "${PROJECT_BINARY_DIR}/poiseConfigVersion.cmake"
  cmake/torch.cmake
  DESTINATION "${_package_dir}")
