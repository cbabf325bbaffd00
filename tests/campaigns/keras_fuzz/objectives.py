"""What a model is trained for: targets, the losses that fit them, and the metrics of each.

Each kind of target says how a head ends, how its labels are made (`shape` is the output's, without the batch), and
which texts may stand for a loss or a metric in `compile`.
"""

import dataclasses
import functools
import re

from tests.campaigns.keras_fuzz.grammar import SYMBOLS, Draw


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of targets."""

    units: tuple[int, ...]
    activations: tuple[str, ...]
    labels: tuple[str, ...]
    losses: tuple[str, ...]
    metrics: tuple[str, ...]


def forms(where: str, *names: str, arguments: str = "") -> tuple[str, ...]:
    """Returns the ways to name a loss or metric: the class's object, and its function, also by its name as a text."""
    texts: list[str] = []
    for name in names:
        class_name, _, function = name.partition("/")
        texts.append(f"keras.{where}.{class_name}({arguments})")
        texts += [f"keras.{where}.{function}", f'"{function}"'] if function else []
    return tuple(texts)


losses, metrics = functools.partial(forms, "losses"), functools.partial(forms, "metrics")


ERRORS = ("MeanSquaredError/mean_squared_error", "MeanAbsoluteError/mean_absolute_error")
RELATIVE = ("MeanAbsolutePercentageError/mean_absolute_percentage_error",)
LOGARITHMIC = ("MeanSquaredLogarithmicError/mean_squared_logarithmic_error",)
CORRELATIONS = ("PearsonCorrelation/pearson_correlation", "ConcordanceCorrelation/concordance_correlation")
ANY = (
    '"mse"',
    '"mae"',
    *metrics(*ERRORS, "RootMeanSquaredError", "LogCoshError", "CosineSimilarity"),
    '"cosine_similarity"',
    "keras.metrics.log_cosh",
    "keras.metrics.huber",
    "keras.metrics.MeanMetricWrapper(keras.losses.huber, name='wrapped', delta=0.5)",
    "own_metric",
    "LargestError()",
)
BY_THRESHOLD = ("FalseNegatives", "FalsePositives", "TrueNegatives", "TruePositives", "Precision", "Recall")
AT = ("PrecisionAtRecall", "RecallAtPrecision", "SensitivityAtSpecificity", "SpecificityAtSensitivity")
SCORES = (
    "keras.metrics.F1Score({average})",
    "keras.metrics.FBetaScore({average}, beta=0.5)",
    "keras.metrics.AUC({auc})",
    *metrics(*BY_THRESHOLD, arguments="{thresholds}"),
    *metrics(*AT, arguments="0.5"),
)
SYMBOLS["average"] = ["average=None", 'average="macro"', 'average="micro", threshold=0.5', 'average="weighted"']
SYMBOLS["auc"] = ["", "num_thresholds=20", 'curve="PR"']
SYMBOLS["thresholds"] = ["", "thresholds=0.3", "thresholds=[0.3, 0.6]"]
SYMBOLS["smoothing"] = ["", "label_smoothing=0.1"]
SYMBOLS["axis"] = ["", "axis=-1"]

MATRICES_ONLY = re.compile("R2Score|F1Score|FBetaScore|multi_label|top_k")

KINDS = {
    "regression": Kind(
        (1, 2, 3),
        ("None",),
        ("normal", "normal", "uniform"),
        (
            '"mse"',
            '"mae"',
            *losses(*ERRORS, "LogCosh/log_cosh", "Huber/huber", *RELATIVE),
            *losses("Huber", arguments="delta=0.3"),
            *losses("CosineSimilarity/cosine_similarity", arguments="{axis}"),
            *losses("MeanSquaredError", arguments='reduction="{reduction}"'),
            "own_loss",
            "Pinball(0.3)",
            "Biased(0.5)",
        ),
        (
            *ANY,
            *metrics(*RELATIVE, "R2Score", *CORRELATIONS),
            'keras.metrics.R2Score(class_aggregation="{aggregation}")',
        ),
    ),
    "positive": Kind(
        (1, 2),
        ('"softplus"', '"exponential"'),
        ("uniform",),
        losses("Poisson/poisson", *LOGARITHMIC, *RELATIVE),
        (*ANY, *metrics("Poisson/poisson", *LOGARITHMIC, *RELATIVE)),
    ),
    "binary": Kind(
        (1, 1, 2),
        ('"sigmoid"',),
        ("bits", "bits", "integer bits", "booleans"),
        (
            '"crossentropy"',
            *losses("BinaryCrossentropy/binary_crossentropy", "BinaryFocalCrossentropy/binary_focal_crossentropy"),
            *losses("BinaryCrossentropy", arguments="{smoothing}"),
            *losses("BinaryFocalCrossentropy", arguments="apply_class_balancing=True, gamma=1.0"),
            *losses("Dice/dice", "Tversky/tversky", arguments="{axis}"),
        ),
        (
            '"accuracy"',
            '"acc"',
            *SCORES,
            *metrics("BinaryAccuracy/binary_accuracy", "BinaryCrossentropy/binary_crossentropy", "Accuracy"),
            "keras.metrics.binary_focal_crossentropy",
            "keras.metrics.BinaryAccuracy(threshold=0.4)",
            "keras.metrics.BinaryIoU({target_ids})",
        ),
    ),
    "logit": Kind(
        (1,),
        ("None",),
        ("bits", "integer bits"),
        losses("BinaryCrossentropy", "BinaryFocalCrossentropy", arguments="from_logits=True"),
        ("keras.metrics.BinaryCrossentropy(from_logits=True)", "keras.metrics.AUC(from_logits=True)", '"accuracy"'),
    ),
    "one_hot": Kind(
        (3,),
        ('"softmax"',),
        ("one_hot",),
        (
            '"crossentropy"',
            *losses("CategoricalCrossentropy/categorical_crossentropy", "KLDivergence/kl_divergence"),
            *losses(
                "CategoricalFocalCrossentropy/categorical_focal_crossentropy", "CategoricalHinge/categorical_hinge"
            ),
            *losses("CategoricalCrossentropy", "CategoricalFocalCrossentropy", arguments="{smoothing}"),
        ),
        (
            '"accuracy"',
            *SCORES,
            *metrics("CategoricalAccuracy/categorical_accuracy", "CategoricalHinge/categorical_hinge"),
            *metrics("CategoricalCrossentropy/categorical_crossentropy", "KLDivergence/kl_divergence"),
            "keras.metrics.categorical_focal_crossentropy",
            *metrics("TopKCategoricalAccuracy", arguments="k=2"),
            "keras.metrics.MeanMetricWrapper(keras.metrics.top_k_categorical_accuracy, name='top', k=2)",
            "keras.metrics.Precision(top_k=1, class_id=1)",
            "keras.metrics.OneHotIoU(3, [0, 2])",
            "keras.metrics.OneHotMeanIoU(3)",
            "keras.metrics.AUC(multi_label=True)",
        ),
    ),
    "sparse": Kind(
        (3,),
        ('"softmax"',),
        ("classes", "classes", "float classes"),
        (
            '"crossentropy"',
            *losses("SparseCategoricalCrossentropy/sparse_categorical_crossentropy"),
            *losses("SparseCategoricalCrossentropy", arguments="ignore_class=1"),
            *losses("CategoricalGeneralizedCrossEntropy", arguments="q=0.7"),
        ),
        (
            '"accuracy"',
            '"acc"',
            *metrics("SparseCategoricalAccuracy/sparse_categorical_accuracy"),
            *metrics("SparseCategoricalCrossentropy/sparse_categorical_crossentropy"),
            *metrics("SparseTopKCategoricalAccuracy", arguments="k=2"),
            "keras.metrics.MeanMetricWrapper(keras.metrics.sparse_top_k_categorical_accuracy, name='top', k=2)",
            "keras.metrics.SparseCategoricalCrossentropy(ignore_class=1)",
            "keras.metrics.IoU(3, [0, 1], sparse_y_pred=False)",
            "keras.metrics.MeanIoU(3, sparse_y_pred=False)",
            "keras.metrics.MeanIoU(3, sparse_y_pred=False, ignore_class=1)",
        ),
    ),
    "signed": Kind(
        (1, 2),
        ('"tanh"', "None"),
        ("signs", "bits"),
        losses("Hinge/hinge", "SquaredHinge/squared_hinge"),
        metrics("Hinge/hinge", "SquaredHinge/squared_hinge"),
    ),
    "embedding": Kind((3,), ("None",), ("flat classes",), losses("Circle"), ()),
    "alignment": Kind((5,), ("None",), ("alignment",), losses("CTC/ctc"), ()),
}
SYMBOLS["target_ids"] = ["", "[0]", "[0, 1], threshold=0.4"]
SYMBOLS["reduction"] = ["mean", "mean_with_sample_weight", "none", "sum"]
SYMBOLS["aggregation"] = ["uniform_average", "variance_weighted_average"]

# How labels are made; `rng` is NumPy's, `shape` the output's with all rows.
LABELS = {
    "normal": "rng.normal(size={shape}).astype('float32')",
    "uniform": "rng.uniform(0.5, 2.0, size={shape})",
    "bits": "rng.integers(0, 2, size={shape}).astype('float32')",
    "integer bits": "rng.integers(0, 2, size={shape})",
    "booleans": "rng.integers(0, 2, size={shape}) > 0",
    "one_hot": "np.eye(3, dtype='float32')[rng.integers(0, 3, size={shape_without_last})]",
    "classes": "rng.integers(0, 3, size={shape_of_classes}).astype('int32')",
    "float classes": "rng.integers(0, 3, size={shape_of_classes}).astype('float32')",
    "signs": "rng.choice([-1.0, 1.0], size={shape}).astype('float32')",
    "flat classes": "rng.integers(0, 2, size={shape_without_last})",
    "alignment": "rng.integers(1, 5, size=({rows}, 2)).astype('int32')",
}


def draw_loss(draw: Draw, kind: str) -> str:
    return draw.text(draw.choice(KINDS[kind].losses))


def draw_metrics(draw: Draw, kind: str, most: int, is_matrix: bool) -> tuple[str, ...]:
    """Returns some metrics of the kind; those that need outputs [B, units] only if the outputs are so."""
    names = [text for text in KINDS[kind].metrics if is_matrix or not MATRICES_ONLY.search(text)]
    return tuple(draw.text(text) for text in draw.sample(names, min(len(names), draw.randint(0, most))))
