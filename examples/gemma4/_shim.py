import equinox as eqx


def checkpointed_layer(fn, *, policy="full", isolation="loop"):
    del isolation
    return fn if policy == "none" else eqx.filter_checkpoint(fn)
