"""What `sgl-prefix-attn calibrate` runs: batches, measuring, fitting.

rates, batches -> measure -> samples -> fit -> Calibration    (procedure.py)
"""
