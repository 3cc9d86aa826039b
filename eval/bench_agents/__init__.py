"""Agent programs on a real server with each attention backend: wall time, throughput, TPOT."""
