"""The texts that a program is made of: how each of Keras's public names is constructed.

A template is a text with `{symbols}`; `Draw.text` replaces each symbol by one of its alternatives, again and again.
"""

import random
import re

ACTIVATIONS = """celu elu exponential gelu hard_shrink hard_sigmoid hard_silu hard_tanh leaky_relu linear log_sigmoid
    log_softmax mish relu relu6 selu sigmoid silu soft_shrink softmax softplus softsign sparse_plus sparse_sigmoid
    sparsemax squareplus tanh tanh_shrink threshold""".split()
SYMBOLS = {
    "units": ["2", "3", "4"],
    "rate": ["0.2", "0.0", "0.0"],
    "maybe_dropout": ["", "", "", "", ", dropout=0.2"],
    "activation": ['"relu"', '"tanh"', '"gelu"', "None", "{activation_function}"],
    "activation_function": [
        f"keras.activations.{name}" for name in ACTIVATIONS if name not in ("threshold", "exponential")
    ],
    "regularizer": [
        '"l2"',
        "keras.regularizers.L2(0.01)",
        "keras.regularizers.L1(0.01)",
        "keras.regularizers.L1L2(0.01, 0.02)",
        "keras.regularizers.OrthogonalRegularizer(0.01)",
    ],
    "vector_regularizer": ['"l1"', "keras.regularizers.L2(0.01)", "keras.regularizers.L1(0.01)"],
    "constraint": [
        "keras.constraints.MaxNorm(0.9)",
        "keras.constraints.MinMaxNorm(0.2, 0.9, rate=0.5)",
        "keras.constraints.NonNeg()",
        "keras.constraints.UnitNorm()",
    ],
    "initializer": [
        '"he_normal"',
        "keras.initializers.Constant(0.1)",
        "keras.initializers.GlorotNormal()",
        "keras.initializers.GlorotUniform()",
        "keras.initializers.HeUniform(seed=3)",
        "keras.initializers.LecunNormal()",
        "keras.initializers.LecunUniform()",
        "keras.initializers.Orthogonal()",
        "keras.initializers.RandomNormal(stddev=0.3)",
        "keras.initializers.RandomUniform(-0.5, 0.5)",
        "keras.initializers.TruncatedNormal(stddev=0.3)",
        "keras.initializers.VarianceScaling(2.0)",
    ],
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
    "cell": ["keras.layers.LSTMCell({units})", "keras.layers.GRUCell({units})", "keras.layers.SimpleRNNCell({units})"]
    + ["keras.layers.StackedRNNCells([{cell}, {cell}])"],
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
# Layers of one input. Name -> the kinds of tensors it is drawn for, and its arguments, or the whole expression.
LAYERS = {
    "Activation": (FLOATS, "{activation_function}"),
    "ActivityRegularization": (FLOATS, "l1=0.01, l2=0.01"),
    "AdaptiveAveragePooling1D": (("sequence",), "{size}"),
    "AdaptiveAveragePooling2D": (IMAGES, "{size}"),
    "AdaptiveAveragePooling3D": (("volume",), "{size}"),
    "AdaptiveMaxPooling1D": (("sequence",), "{size}"),
    "AdaptiveMaxPooling2D": (IMAGES, "{size}"),
    "AdaptiveMaxPooling3D": (("volume",), "{size}"),
    "AlphaDropout": (FLOATS, "{rate}"),
    "AugMix": (IMAGES, "{range}"),
    "AutoContrast": (IMAGES, "{range}"),
    "AveragePooling1D": (("sequence",), "2, {padding}"),
    "AveragePooling2D": (IMAGES, "2, {padding}"),
    "AveragePooling3D": (("volume",), "2, {padding}"),
    "BatchNormalization": (FLOATS, "{batch_norm}"),
    "Bidirectional": (
        ("sequence",),
        ["keras.layers.LSTM({units}{recurrent}{returns})", "keras.layers.GRU({units}), merge_mode='sum'"],
    ),
    "CategoryEncoding": (("tokens",), ['num_tokens=12, output_mode="{counts}"']),
    "CenterCrop": (IMAGES, "4, 4"),
    "ContrastLimitedAdaptiveHistogramEqualization": (IMAGES, "{range}, tile_grid_size=(2, 2)"),
    "Conv1D": (("sequence",), "{units}, 2, {padding}, activation={activation}{kernel}"),
    "Conv1DTranspose": (("sequence",), "{units}, 2, {padding}, activation={activation}{kernel}"),
    "Conv2D": (IMAGES, "{units}, 2, {padding}, activation={activation}{kernel}"),
    "Conv2DTranspose": (IMAGES, "{units}, 2, {padding}, activation={activation}{kernel}"),
    "Conv3D": (("volume",), "{units}, 2, {padding}, activation={activation}{kernel}"),
    "Conv3DTranspose": (("volume",), "{units}, 2, {padding}, activation={activation}{kernel}"),
    "ConvLSTM1D": (IMAGES, '{units}, 2, padding="same"{returns}'),
    "ConvLSTM2D": (("volume",), '{units}, 2, padding="same"{returns}'),
    "ConvLSTM3D": (("movie",), '{units}, 2, padding="same"'),
    "Cropping1D": (("sequence",), "(1, 0)"),
    "Cropping2D": (IMAGES, "((1, 0), (0, 1))"),
    "Cropping3D": (("volume",), "((1, 0), (0, 0), (0, 1))"),
    "CutMix": (IMAGES, ""),
    "Dense": (FLOATS, "{units}, activation={activation}{matrix}"),
    "DepthwiseConv1D": (("sequence",), "2, {padding}, activation={activation}, depthwise_regularizer='l2'"),
    "DepthwiseConv2D": (IMAGES, "2, {padding}, depth_multiplier=2"),
    "Discretization": (("raw vector",), ["bin_boundaries=[-0.5, 0.5], output_mode='one_hot'", "num_bins=3"]),
    "Dropout": (FLOATS, "{rate}"),
    "ELU": (FLOATS, "0.5"),
    "EinsumDense": (("sequence",), '"abc,cd->abd", output_shape=(None, {units}), bias_axes="d"'),
    "Embedding": (("tokens",), "12, {units}{mask_zero}{embeddings}"),
    "Equalization": (IMAGES, "{range}"),
    "Flatten": (FLOATS[1:], ""),
    "GRU": (("sequence",), "{units}{recurrent}{returns}"),
    "GaussianDropout": (FLOATS, "{rate}"),
    "GaussianNoise": (FLOATS, "{rate}"),
    "GlobalAveragePooling1D": (("sequence",), ""),
    "GlobalAveragePooling2D": (IMAGES, ""),
    "GlobalAveragePooling3D": (("volume",), ""),
    "GlobalMaxPooling1D": (("sequence",), ""),
    "GlobalMaxPooling2D": (IMAGES, "keepdims=True"),
    "GlobalMaxPooling3D": (("volume",), ""),
    "GroupNormalization": (FLOATS, "groups=1{norm}"),
    "Hashing": (("strings", "tokens"), "12"),
    "Identity": (FLOATS, ""),
    "IntegerLookup": (("tokens",), ["vocabulary=[1, 2, 3, 5, 8]", "output_mode='multi_hot', max_tokens=5"]),
    "LSTM": (("sequence",), "{units}{recurrent}{returns}"),
    "Lambda": (FLOATS, "lambda h: 2 * keras.ops.sin(h)"),
    "LayerNormalization": (FLOATS, "epsilon=1e-3{norm}"),
    "LeakyReLU": (FLOATS, "0.2"),
    "Masking": (("sequence",), ""),
    "MaxPooling1D": (("sequence",), "2, {padding}"),
    "MaxPooling2D": (IMAGES, "2, {padding}"),
    "MaxPooling3D": (("volume",), "2, {padding}"),
    "MelSpectrogram": (("signal",), "fft_length=8, sequence_stride=4, sampling_rate=100, num_mel_bins=3, min_freq=1"),
    "MixUp": (IMAGES, ""),
    "Normalization": (("raw vector",), ["", "axis=None", "mean=0.5, variance=2.0", "invert=True"]),
    "PReLU": (FLOATS, "alpha_initializer='ones'"),
    "Permute": (("sequence",), "(2, 1)"),
    "Pipeline": (IMAGES, "[keras.layers.Rescaling(2.0), keras.layers.RandomFlip()]"),
    "RMSNormalization": (FLOATS, ""),
    "RNN": (("sequence",), "{cell}{returns}"),
    "RandAugment": (IMAGES, "{range}"),
    "RandomBrightness": (IMAGES, "0.2, {range}"),
    "RandomColorDegeneration": (IMAGES, "0.2, {range}"),
    "RandomColorJitter": (IMAGES, "{range}, brightness_factor=0.2"),
    "RandomContrast": (IMAGES, "0.2, {range}"),
    "RandomCrop": (IMAGES, "4, 4"),
    "RandomElasticTransform": (IMAGES, "{range}"),
    "RandomErasing": (IMAGES, "{range}"),
    "RandomFlip": (IMAGES, ""),
    "RandomGaussianBlur": (IMAGES, "{range}"),
    "RandomGrayscale": (IMAGES, ""),
    "RandomHue": (IMAGES, "0.2, {range}"),
    "RandomInvert": (IMAGES, "{range}"),
    "RandomPerspective": (IMAGES, ""),
    "RandomPosterization": (IMAGES, "4, {range}"),
    "RandomRotation": (IMAGES, "0.2"),
    "RandomSaturation": (IMAGES, "0.2, {range}"),
    "RandomSharpness": (IMAGES, "0.2, {range}"),
    "RandomShear": (IMAGES, "0.2"),
    "RandomTranslation": (IMAGES, "0.2, 0.2"),
    "RandomZoom": (IMAGES, "0.2"),
    "ReLU": (FLOATS, "negative_slope=0.1"),
    "RepeatVector": (("vector",), "3"),
    "Rescaling": (FLOATS, "0.5, offset=0.1"),
    "Reshape": (("vector",), "(-1, 1)"),
    "Resizing": (IMAGES, "4, 5"),
    "ReversibleEmbedding": (("tokens",), "12, {units}{mask_zero}"),
    "STFTSpectrogram": (("signal",), "frame_length=8, frame_step=4, fft_length=8, expand_dims=False"),
    "SeparableConv1D": (("sequence",), "{units}, 2, {padding}, activation={activation}"),
    "SeparableConv2D": (IMAGES, "{units}, 2, {padding}, activation={activation}"),
    "SimpleRNN": (("sequence",), "{units}{recurrent}{returns}"),
    "Softmax": (FLOATS, ""),
    "Solarization": (IMAGES, "0.1, 0.5, {range}"),
    "SpatialDropout1D": (("sequence",), "{rate}"),
    "SpatialDropout2D": (IMAGES, "{rate}"),
    "SpatialDropout3D": (("volume",), "{rate}"),
    "SpectralNormalization": (FLOATS, "keras.layers.Dense({units})"),
    "StringLookup": (("strings",), ['vocabulary=["a", "b", "c"]', "output_mode='multi_hot'", "num_oov_indices=2"]),
    "TextVectorization": (("texts",), "output_sequence_length=4"),  # counts have another symbolic shape
    "TimeDistributed": (("sequence", "image"), "keras.layers.Dense({units}{matrix})"),
    "UnitNormalization": (FLOATS, ""),
    "UpSampling1D": (("sequence",), "2"),
    "UpSampling2D": (IMAGES, "2, interpolation='bilinear'"),
    "UpSampling3D": (("volume",), "2"),
    "ZeroPadding1D": (("sequence",), "1"),
    "ZeroPadding2D": (IMAGES, "1"),
    "ZeroPadding3D": (("volume",), "1"),
}
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
    "ScheduleFreeAdamW": "0.01, epsilon=1e-3",
}
SYMBOLS["amsgrad"] = ["", ", amsgrad=True"]
SYMBOLS["rmsprop"] = ["", ", centered=True", ", momentum=0.9"]
SYMBOLS["momentum"] = ["", "", ", momentum=0.9", ", momentum=0.9, nesterov=True"]
