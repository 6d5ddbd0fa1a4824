"""How far a plan is from the model it was built from: ``trtcb eval``."""
