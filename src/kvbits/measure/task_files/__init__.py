"""Task files for lm-evaluation-harness, read by :mod:`kvbits.measure.task_data`, and how their answers are graded."""
