"""How good the policy's choices are on batches that its calibration has not seen."""
