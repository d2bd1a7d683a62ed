"""Gemma-4 small (E2B, E4B) in Equinox: the reference consumer of remat_scan."""
