"""What `sgl-prefix-attn calibrate` runs: batches, measuring, fitting.

batches, cuts -> measure -> samples -> fit -> Calibration    (procedure.py)
"""
