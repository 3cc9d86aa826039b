"""One decode step on the host: is the plan still valid, which kernels, a new plan or none."""
