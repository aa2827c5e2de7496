// Marks the symbols that libpoise hands out; everything else is hidden.
#pragma once
#define POISE_API __attribute__((visibility("default")))
