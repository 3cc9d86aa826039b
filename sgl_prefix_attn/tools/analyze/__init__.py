"""Say before a server is started whether its load would gain: a trace, simulated and predicted."""
