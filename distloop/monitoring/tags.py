"""Tags: group and description of every number in TensorBoard; the names of the numbers about the run itself.

    group_tag("loss")                           # "Metrics/loss"
    group_tag("discriminator/learning_rate")    # "optimizer/discriminator/learning_rate"
    describe("optimizer/discriminator/learning_rate")

TensorBoard sorts groups by name, capital letters first, and opens the first two. Other files have names without groups.
"""

METRICS = "Metrics"  # loss and metrics: the first group

# The numbers that distloop reports itself: group -> name -> description.
GROUPS = {
    METRICS: {
        "loss": "The data term that training minimizes: a weighted mean over the examples since the last log. In an "
        "evaluation: over all its examples.",
        "regularization": "The sum of `model.losses`, such as L2 terms. It is not part of `loss`.",
    },
    "optimizer": {
        "learning_rate": "Of the last step.",
        "gradient_norm": "The global norm of the gradient before clipping.",
        "clipped_share": "The fraction of the steps since the last log whose gradient was clipped.",
        "loss_scale": "The factor of the loss in float16.",
        "skipped_steps": "Steps since step 0 that changed nothing, because a gradient was not finite.",
        "weight_norm": "The global norm of the weights that train, without tables that are updated by rows.",
        "update_norm": "How far the weights moved since the last histograms: the norm of the difference.",
        "update_ratio": "`update_norm` divided by `weight_norm`.",
    },
    "data": {
        "examples_seen": "Examples that the run has trained on since step 0; of a mixture, those of each source, too.",
        "epochs_seen": "Passes over the data that the run trains on, with the fraction of the one in progress.",
    },
    "per_layer": {
        "activation_mean": "The mean of a layer's outputs, over the examples of `distloop.ActivationHistograms`.",
        "activation_deviation": "The standard deviation of a layer's outputs over those examples.",
    },
    "speed": {
        "steps_per_sec": "Training steps a second, without evaluations, checkpoints and logging.",
        "examples_per_sec": "Training examples a second, of all replicas together.",
        "tokens_per_sec": "Trained tokens a second, of all replicas together: the sum of the loss's weights.",
        "input_wait": "The fraction of the loop's time that went to waiting for data.",
        "goodput": "The fraction of the time since the run's first process that went to steps that count.",
        "host_share": "The fraction of all time between two loops: evaluations, actions, checkpoints, logging.",
        "copy_pause_secs": "How long the last copy in memory held training up, in seconds.",
        "save_pause_secs": "How long the last save held training up, in seconds.",
        "save_secs": "How long the last save took until its checkpoint was whole, in seconds.",
        "step_secs_p50": "Half of the steps took no longer, in seconds.",
        "step_secs_p90": "90 % of the steps took no longer, in seconds.",
        "step_secs_p99": "99 % of the steps took no longer, in seconds.",
        "replica_imbalance": "Forward and backward time of the slowest replica, divided by the mean, minus 1.",
        "model_flops_per_sec": "Floating-point operations a second: those of the forward pass, times three.",
        "model_flops_utilization": "`model_flops_per_sec` divided by the peak of the devices.",
    },
    "system": {
        "host_memory_gb": "Peak memory of the first worker's process, in gigabytes.",
        "device_memory_gb": "Peak memory of the fullest GPU of the first worker, in gigabytes.",
        "device_busy_share": "The fraction of the profiled time in which a device of the pipeline computed.",
    },
}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}

_VALUE = (
    "A value of `loss_fn`, or a number of an action. Values of `loss_fn` are weighted means over the examples since "
    "the last log; in an evaluation, over all its examples."
)
_MEDIA = "Returned by an action, such as a `distloop.Summary`."
_MEDIA_GROUPS = {
    "keras": "The layers of the model.",
    "run": "Written when the run starts.",
    "weights": "The values of a variable.",
    "activations": "At most 131,072 outputs of a layer, for the examples of `distloop.ActivationHistograms`.",
    "gradients": "The gradient of a variable in one step, after clipping.",
}


def group_tag(name: str) -> str:
    """Returns the tag of a number: its name under the group of its last part, `Metrics` for the user's values."""
    return f"{_GROUP_OF.get(name.rpartition('/')[2], METRICS)}/{name}"


def describe(tag: str) -> str:
    """Returns the description of a number, in Markdown, by its tag."""
    name = tag.rpartition("/")[2]
    return GROUPS[_GROUP_OF[name]][name] if name in _GROUP_OF else _VALUE


def describe_media(tag: str) -> str:
    """Returns the description of media, in Markdown, by their tag."""
    return _MEDIA_GROUPS.get(tag.partition("/")[0], _MEDIA)
