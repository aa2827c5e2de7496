# Header-only libraries used inside poise; none of them shows in a public header.
find_package(nlohmann_json 3.9 REQUIRED)
find_package(CLI11 REQUIRED)
find_package(Threads REQUIRED)
if(POISE_DEVELOPER)
  find_package(GTest REQUIRED)
endif()
