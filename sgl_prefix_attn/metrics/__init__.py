"""What decode steps did: counters, SGLang's /metrics, the line in the log.

step -> step_count -> counters -> exporter, decode_log
"""
