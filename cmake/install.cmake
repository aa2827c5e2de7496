# cmake --install: headers, library, and the package that find_package(poise) reads.
