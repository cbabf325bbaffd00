"""Groups and descriptions of numbers in TensorBoard."""

from distloop.monitoring import tags


def test_loss_and_metrics_are_in_the_first_group():
    assert tags.group_tag("loss") == "Metrics/loss"
    assert tags.group_tag("discriminator/accuracy") == "Metrics/discriminator/accuracy"
    groups = [*tags.GROUPS, "confusion", "gradients", "weights"]
    assert min(groups) == "Metrics"  # TensorBoard sorts by the code of the characters


def test_numbers_about_the_run_are_grouped_by_their_last_part():
    assert tags.group_tag("discriminator/learning_rate") == "optimizer/discriminator/learning_rate"
    assert tags.group_tag("steps_per_sec") == "speed/steps_per_sec"
    assert tags.group_tag("stage_0/device_memory_gb") == "system/stage_0/device_memory_gb"


def test_every_tag_has_a_description():
    assert tags.describe("optimizer/discriminator/update_ratio") == "`update_norm` divided by `weight_norm`."
    assert "weighted means" in tags.describe("Metrics/accuracy")
    assert "after clipping" in tags.describe_media("gradients/dense/kernel")
    assert "distloop.Summary" in tags.describe_media("samples")
