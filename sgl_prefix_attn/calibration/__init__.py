"""What this GPU does: measured once, kept in a file, read at every start.

rates, batches -> measure -> samples -> fit -> Calibration -> store     (run.py)
store.find -> Calibration, the same on every rank                      (startup.py)
"""
