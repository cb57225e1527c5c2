"""Scripts for Opacus in the shape of its own examples; `test_ported.py` runs them with it, and ported to lmdp."""
