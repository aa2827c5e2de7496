// The program `poise`: everything is in the library.
#include "poise/cli.h"

int main(int argc, char** argv) { return poise::cli::run(argc, argv); }
