"""The commands of ``gradreduce``, one module each."""
