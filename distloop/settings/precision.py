"""The precisions of a run: what layers compute in, whether the loss is scaled, how finely numbers are rounded.

precision = PRECISIONS[config.precision]
precision.compute_dtype                      # "float16"
precision.needs_loss_scale                   # True

Without Keras; `model/dtype_policy.py` makes layers under a precision.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Precision:
    """What the layers of a run compute in; weights are float32 in each.

    Attributes:
        name: of `Config.precision`, and of the dtype policy in Keras.
        compute_dtype: of activations and gradients.
        needs_loss_scale: whether small gradients would become 0 without a scaled loss.
        roundoff: the largest relative error of rounding a number to `compute_dtype`.
    """

    name: str
    compute_dtype: str
    needs_loss_scale: bool
    roundoff: float

    @property
    def is_half(self) -> bool:
        """Whether numbers are rounded more coarsely than to float32."""
        return self.roundoff > FLOAT32.roundoff


FLOAT32 = Precision("float32", "float32", needs_loss_scale=False, roundoff=2.0**-24)
FLOAT16 = Precision("mixed_float16", "float16", needs_loss_scale=True, roundoff=2.0**-11)
BFLOAT16 = Precision("mixed_bfloat16", "bfloat16", needs_loss_scale=False, roundoff=2.0**-8)

PRECISIONS = {precision.name: precision for precision in (FLOAT32, FLOAT16, BFLOAT16)}
HALF_DTYPES = tuple(precision.compute_dtype for precision in PRECISIONS.values() if precision.is_half)
