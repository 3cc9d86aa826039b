"""What decode steps did: counters, SGLang's /metrics, the line in the log.

step -> stepcount -> counters -> exporter, decode_log
"""
