"""Three Tritons behind one gateway under load: one killed, one stopped, one slow, one added."""
