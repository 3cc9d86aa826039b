"""What this GPU does: measured once, kept in a file, read at every start.

batches -> measure -> fit -> Calibration -> store
"""
