"""What `scripts/gpu_check.py` runs: parity of kernels on the device, their bandwidth, and whole verify steps."""
