"""Are the numbers what they should be: fingerprints of tensors, where two copies differ, what is compared with whom.

Imports nothing by itself; a rank imports ``steadyrun.integrity.fingerprint`` once torch is there.
"""
