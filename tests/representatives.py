"""The presets that a test of all presets runs by default."""

REPRESENTATIVES = {
    "post_ln",  # a norm after each sum
    "pre_ln",  # a norm before each branch, and one at the end
    "realformer",  # residual attention: scores are carried from layer to layer
    "v_skipinit",  # shaped attention without a centre, orthogonal values and outputs
    "sas",  # shaped attention with a centre, no skip, identity values and outputs
    "parallel",  # both branches read one norm and join one sum
    "hyper_connections",  # several streams that learn what they read, keep and write
    "ngpt",  # normalised matrices, branches and sums, and a rule that is no plain sum
}
"""One preset of each structural form: a fault of the code that all presets share shows in one of
them. What a preset alone says is tested by `models/test_reference` and `models/test_conformance`,
which run all of them."""
