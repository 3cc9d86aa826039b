"""The portable kernel, in Triton: every NVIDIA GPU from sm_80 on."""
