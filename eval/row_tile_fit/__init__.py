"""One time model of row tiles for a GPU: sampled over several head configurations, and judged."""
