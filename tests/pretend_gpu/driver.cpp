// A stand-in for libcuda.so.1, which torch opens to ask whether a device has a context.
extern "C" {

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cuCtxGetCurrent(void** context) {
  static int one;
  *context = &one;
  return 0;
}
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "an error of the pretend GPU";
  return 0;
}
}
