"""A recorded trace replayed against several attention backends: TTFT and TPOT of its requests."""
