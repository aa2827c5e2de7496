#include "kernels/launch.h"
namespace poise::kernels {
const char* name_of(Backend b) { return b == Backend::cpu ? "cpu" : b == Backend::cuda ? "cuda" : "reference"; }
}
