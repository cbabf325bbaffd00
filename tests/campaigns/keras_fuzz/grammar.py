"""The texts that a program is made of: how each of Keras's public names is constructed.

A template is a text with `{symbols}`; `Draw.text` replaces each symbol by one of its alternatives, again and again.
"""

import random
import re

ACTIVATIONS = """celu elu exponential gelu hard_shrink hard_sigmoid hard_silu hard_tanh leaky_relu linear log_sigmoid
    log_softmax mish relu relu6 selu sigmoid silu soft_shrink softmax softplus softsign sparse_plus sparse_sigmoid
    sparsemax squareplus tanh tanh_shrink threshold""".split()


def of_keras(module: str, *texts: str) -> list[str]:
    return [f"keras.{module}.{text}" for text in texts]


SYMBOLS = {
    "units": ["2", "3", "4"],
    "rate": ["0.2", "0.0", "0.0"],
    "maybe_dropout": ["", "", "", "", ", dropout=0.2"],
    "activation": ['"relu"', '"tanh"', '"gelu"', "None", "{activation_function}"],
    "activation_function": of_keras("activations", *(n for n in ACTIVATIONS if n not in ("threshold", "exponential"))),
    "regularizer": [
        '"l2"',
        *of_keras("regularizers", "L2(0.01)", "L1(0.01)", "L1L2(0.01, 0.02)", "OrthogonalRegularizer(0.01)"),
    ],
    "vector_regularizer": ['"l1"', "keras.regularizers.L2(0.01)", "keras.regularizers.L1(0.01)"],
    "constraint": of_keras("constraints", "MaxNorm(0.9)", "MinMaxNorm(0.2, 0.9, rate=0.5)", "NonNeg()", "UnitNorm()"),
    "initializer": ['"he_normal"']
    + of_keras("initializers", "Constant(0.1)", "GlorotNormal()", "GlorotUniform()", "HeUniform(seed=3)")
    + of_keras("initializers", "LecunNormal()", "LecunUniform()", "Orthogonal()", "RandomNormal(stddev=0.3)")
    + of_keras("initializers", "RandomUniform(-0.5, 0.5)", "TruncatedNormal(stddev=0.3)", "VarianceScaling(2.0)"),
    "matrix": ["", "", "", "{matrix_setting}", "{matrix_setting}{bias_setting}"],
    "matrix_setting": [
        ", kernel_regularizer={regularizer}",
        ", kernel_constraint={constraint}",
        ", kernel_initializer={initializer}",
        ", activity_regularizer={vector_regularizer}",
    ],
    "kernel": ["", "", "", ", kernel_regularizer={vector_regularizer}", ", kernel_constraint={constraint}"]
    + [", kernel_initializer={initializer}", ", activity_regularizer={vector_regularizer}", "{bias_setting}"],
    "bias_setting": [", use_bias=False", ", bias_regularizer={vector_regularizer}"]
    + [", bias_constraint=keras.constraints.MaxNorm(0.5)", ', bias_initializer="ones"', ", trainable=False"],
    "norm": ["", "", ", gamma_regularizer={vector_regularizer}", ", center=False"]
    + [", beta_initializer=keras.initializers.Zeros(), gamma_initializer=keras.initializers.Ones()"]
    + [", trainable=False", ", scale=False"],
    "padding": ['padding="same"', 'padding="same"', 'padding="valid"'],
    "recurrent": ["", "", ", go_backwards=True", ", unroll=True", ', recurrent_regularizer="l2"', "{maybe_dropout}"]
    + [", use_bias=False", ", kernel_regularizer={regularizer}", ", kernel_constraint={constraint}"],
    "returns": ["", ", return_sequences=True", ", return_sequences=True"],
    "cell": of_keras("layers", "LSTMCell({units})", "GRUCell({units})", "SimpleRNNCell({units})")
    + of_keras("layers", "StackedRNNCells([{cell}, {cell}])"),
    "size": ["1", "2", "3"],
    "range": ["value_range=(0, 1)"],
    "mask_zero": ["", ", mask_zero=True", ", mask_zero=True"],
    "embeddings": ["", "", ', embeddings_regularizer="l2"', ", embeddings_constraint={constraint}"],
    "lr": ["0.01", "0.03", "0.1", "0.02", "keras.optimizers.schedules.{schedule}"],
    "schedule": [
        "CosineDecay(0.05, 4)",
        "CosineDecay(0.01, 3, warmup_target=0.05, warmup_steps=2)",
        "CosineDecayRestarts(0.05, 2)",
        "ExponentialDecay(0.05, 2, 0.5)",
        "InverseTimeDecay(0.05, 2, 0.5, staircase=True)",
        "PiecewiseConstantDecay([1, 3], [0.05, 0.02, 0.01])",
        "PolynomialDecay(0.05, 4)",
    ],
    "decay": ["", "", ", weight_decay=0.1"],
}


class Draw(random.Random):
    """Random choices of texts."""

    def text(self, template: str) -> str:
        """Returns the template with each `{symbol}` replaced by one of its alternatives."""
        return re.sub(r"\{(\w+)\}", lambda match: self.text(self.choice(SYMBOLS[match[1]])), template)

    def has(self, probability: float) -> bool:
        return self.random() < probability


FLOATS = ("vector", "sequence", "image", "volume")
IMAGES = ("image",)
CONVOLUTION = "{units}, 2, {padding}, activation={activation}{kernel}"
# Layers of sequences, images and volumes, whose names end in 1D, 2D and 3D: the name before that, and the arguments.
OF_ANY_DIMENSION = {
    "AdaptiveAveragePooling": "{size}",
    "AdaptiveMaxPooling": "{size}",
    "AveragePooling": "2, {padding}",
    "Conv": CONVOLUTION,
    "GlobalAveragePooling": "",
    "MaxPooling": "2, {padding}",
    "SpatialDropout": "{rate}",
    "ZeroPadding": "1",
}
# Layers with the same arguments: the kinds of tensors that they are drawn for, the arguments, and the names.
WITH_THE_SAME = [
    (FLOATS, "", "Identity RMSNormalization Softmax UnitNormalization"),
    (FLOATS, "{rate}", "AlphaDropout Dropout GaussianDropout GaussianNoise"),
    (("sequence",), "", "GlobalMaxPooling1D Masking"),
    (("sequence",), "{units}{recurrent}{returns}", "GRU LSTM SimpleRNN"),
    (IMAGES, "", "CutMix MixUp RandomFlip RandomGrayscale RandomPerspective"),
    (IMAGES, "{range}", "AugMix AutoContrast Equalization RandAugment RandomElasticTransform RandomErasing"),
    (IMAGES, "{range}", "RandomGaussianBlur RandomInvert"),
    (IMAGES, "0.2", "RandomRotation RandomShear RandomZoom"),
    (IMAGES, "0.2, {range}", "RandomBrightness RandomColorDegeneration RandomContrast RandomHue RandomSaturation"),
    (IMAGES, "0.2, {range}", "RandomSharpness"),
    (IMAGES, "4, 4", "CenterCrop RandomCrop"),
]
# All layers of one input. Name -> the kinds of tensors it is drawn for, and its arguments, or several to choose from.
LAYERS = {name: (kinds, arguments) for kinds, arguments, names in WITH_THE_SAME for name in names.split()}
LAYERS |= {
    f"{name}{dimensions}D": ((kind,), arguments)
    for name, arguments in OF_ANY_DIMENSION.items()
    for dimensions, kind in enumerate(FLOATS[1:], start=1)
}
LAYERS |= {
    "Activation": (FLOATS, "{activation_function}"),
    "ActivityRegularization": (FLOATS, "l1=0.01, l2=0.01"),
    "BatchNormalization": (FLOATS, "{batch_norm}"),
    "Bidirectional": (
        ("sequence",),
        ["keras.layers.LSTM({units}{recurrent}{returns})", "keras.layers.GRU({units}), merge_mode='sum'"],
    ),
    "CategoryEncoding": (("tokens",), ['num_tokens=12, output_mode="{counts}"']),
    "ContrastLimitedAdaptiveHistogramEqualization": (IMAGES, "{range}, tile_grid_size=(2, 2)"),
    "Conv1DTranspose": (("sequence",), "{units}, 2, {padding}, activation={activation}{kernel}"),
    "Conv2DTranspose": (IMAGES, "{units}, 2, {padding}, activation={activation}{kernel}"),
    "Conv3DTranspose": (("volume",), "{units}, 2, {padding}, activation={activation}{kernel}"),
    "ConvLSTM1D": (IMAGES, '{units}, 2, padding="same"{returns}'),
    "ConvLSTM2D": (("volume",), '{units}, 2, padding="same"{returns}'),
    "ConvLSTM3D": (("movie",), '{units}, 2, padding="same"'),
    "Cropping1D": (("sequence",), "(1, 0)"),
    "Cropping2D": (IMAGES, "((1, 0), (0, 1))"),
    "Cropping3D": (("volume",), "((1, 0), (0, 0), (0, 1))"),
    "Dense": (FLOATS, "{units}, activation={activation}{matrix}"),
    "DepthwiseConv1D": (("sequence",), "2, {padding}, activation={activation}, depthwise_regularizer='l2'"),
    "DepthwiseConv2D": (IMAGES, "2, {padding}, depth_multiplier=2"),
    "Discretization": (("raw vector",), ["bin_boundaries=[-0.5, 0.5], output_mode='one_hot'", "num_bins=3"]),
    "ELU": (FLOATS, "0.5"),
    "EinsumDense": (("sequence",), '"abc,cd->abd", output_shape=(None, {units}), bias_axes="d"'),
    "Embedding": (("tokens",), "12, {units}{mask_zero}{embeddings}"),
    "Flatten": (FLOATS[1:], ""),
    "GlobalMaxPooling2D": (IMAGES, "keepdims=True"),
    "GlobalMaxPooling3D": (("volume",), ""),
    "GroupNormalization": (FLOATS, "groups=1{norm}"),
    "Hashing": (("strings", "tokens"), "12"),
    "IntegerLookup": (("tokens",), ["vocabulary=[1, 2, 3, 5, 8]", "output_mode='multi_hot', max_tokens=5"]),
    "Lambda": (FLOATS, "lambda h: 2 * keras.ops.sin(h)"),
    "LayerNormalization": (FLOATS, "epsilon=1e-3{norm}"),
    "LeakyReLU": (FLOATS, "0.2"),
    "MelSpectrogram": (("signal",), "fft_length=8, sequence_stride=4, sampling_rate=100, num_mel_bins=3, min_freq=1"),
    "Normalization": (("raw vector",), ["", "axis=None", "mean=0.5, variance=2.0", "invert=True"]),
    "PReLU": (FLOATS, "alpha_initializer='ones'"),
    "Permute": (("sequence",), "(2, 1)"),
    "Pipeline": (IMAGES, "[keras.layers.Rescaling(2.0), keras.layers.RandomFlip()]"),
    "RNN": (("sequence",), "{cell}{returns}"),
    "RandomColorJitter": (IMAGES, "{range}, brightness_factor=0.2"),
    "RandomPosterization": (IMAGES, "4, {range}"),
    "RandomTranslation": (IMAGES, "0.2, 0.2"),
    "ReLU": (FLOATS, "negative_slope=0.1"),
    "RepeatVector": (("vector",), "3"),
    "Rescaling": (FLOATS, "0.5, offset=0.1"),
    "Reshape": (("vector",), "(-1, 1)"),
    "Resizing": (IMAGES, "4, 5"),
    "ReversibleEmbedding": (("tokens",), "12, {units}{mask_zero}"),
    "STFTSpectrogram": (("signal",), "frame_length=8, frame_step=4, fft_length=8, expand_dims=False"),
    "SeparableConv1D": (("sequence",), "{units}, 2, {padding}, activation={activation}"),
    "SeparableConv2D": (IMAGES, "{units}, 2, {padding}, activation={activation}"),
    "Solarization": (IMAGES, "0.1, 0.5, {range}"),
    "SpectralNormalization": (FLOATS, "keras.layers.Dense({units})"),
    "StringLookup": (("strings",), ['vocabulary=["a", "b", "c"]', "output_mode='multi_hot'", "num_oov_indices=2"]),
    "TextVectorization": (("texts",), "output_sequence_length=4"),  # counts have another symbolic shape
    "TimeDistributed": (("sequence", "image"), "keras.layers.Dense({units}{matrix})"),
    "UpSampling1D": (("sequence",), "2"),
    "UpSampling2D": (IMAGES, "2, interpolation='bilinear'"),
    "UpSampling3D": (("volume",), "2"),
}
LAYERS = dict(sorted(LAYERS.items()))
SYMBOLS["counts"] = ["multi_hot", "count", "one_hot"]
SYMBOLS["batch_norm"] = ["synchronized=True{norm}"] * 3 + ["momentum=0.5{norm}", "trainable=False"]
ADAPTED = re.compile(
    r"Normalization\((axis=None|invert=True|)\)|num_bins=|output_mode=.(multi_hot)|num_oov|_sequence_length"
)
# Layers of two inputs, which come from two layers after the same tensor: the layer, if any, and how it is called.
MERGES = {
    name: (f"keras.layers.{name}()", "{h} = {2}([{0}({h}), {1}({h})])")
    for name in ("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract")
}
MERGES |= {name.lower(): ("", f"{{h}} = keras.layers.{name.lower()}([{{0}}({{h}}), {{1}}({{h}})])") for name in MERGES}
ATTENTIONS = {
    "Dot": ("keras.layers.Dot(-1, normalize=True)", "{h} = {2}([{0}({h}), {1}({h})])"),
    "dot": ("", "{h} = keras.layers.dot([{0}({h}), {1}({h})], axes=-1)"),
    "Attention": ("keras.layers.Attention(use_scale=True{maybe_dropout})", "{h} = {2}([{0}({h}), {1}({h})])"),
    "AdditiveAttention": ("keras.layers.AdditiveAttention()", "{h} = {2}([{0}({h}), {1}({h})])"),
    "MultiHeadAttention": ("keras.layers.MultiHeadAttention(2, 3{maybe_dropout})", "{h} = {2}({0}({h}), {1}({h}))"),
    "GroupQueryAttention": ("keras.layers.GroupQueryAttention(2, 4, 2)", "{h} = {2}({0}({h}), {1}({h}))"),
}

# What ends a branch of several inputs, so that they can be concatenated.
SQUASHES = {
    "tokens": ['keras.layers.CategoryEncoding(12, output_mode="multi_hot")'],
    "sequence": ["keras.layers.Flatten()", "keras.layers.GlobalAveragePooling1D()", "keras.layers.LSTM(3)"],
    "image": ["keras.layers.GlobalMaxPooling2D()", "keras.layers.Flatten()"],
    "volume": ["keras.layers.GlobalAveragePooling3D()", "keras.layers.Flatten()"],
}

OPTIMIZERS = {
    "Adadelta": "1.0{decay}",
    "Adafactor": "0.05{decay}",
    "Adagrad": "{lr}{decay}",
    "Adam": "{lr}, epsilon=1e-3{amsgrad}{decay}",
    "AdamW": "{lr}, epsilon=1e-3, weight_decay=0.1",
    "Adamax": "{lr}, epsilon=1e-3{decay}",
    "Ftrl": "{lr}, l1_regularization_strength=0.01, l2_regularization_strength=0.01, beta=0.1",
    "Lamb": "{lr}, epsilon=1e-3{decay}",
    "Lion": "0.01{decay}",
    "LossScaleOptimizer": "keras.optimizers.SGD({lr}), initial_scale=64.0",
    "MultiOptimizer": 'keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {".*s": keras.optimizers.Adam(0.1)})',
    "Muon": "{lr}, epsilon=1e-3",
    "Nadam": "{lr}, epsilon=1e-3{decay}",
    "RMSprop": "{lr}, epsilon=1e-3{rmsprop}{decay}",
    "SGD": "{lr}{momentum}{decay}",
    "ScheduleFreeAdamW": "0.01, epsilon=1e-3, beta_1=1.0",  # where Keras's rule is the paper's
}
SYMBOLS["amsgrad"] = ["", ", amsgrad=True"]
SYMBOLS["rmsprop"] = ["", ", centered=True", ", momentum=0.9"]
SYMBOLS["momentum"] = ["", "", ", momentum=0.9", ", momentum=0.9, nesterov=True"]
