"""The models: architectures of keras.applications, and backbones of KerasHub, small, with random weights.

    model = make("ResNet50")                # compiled, 10 classes, images of 32 x 32
    model = make("small/ResNet50")          # its first layers, which are of all its kinds, and a head for 10 classes
    model = make("hub/BertBackbone")        # one layer, width 16, and a head for 10 classes
    inputs, labels = batch_for(model)

Each is the same function of its rows on any number of replicas: dropout is off, BatchNormalization is synchronized, and
routers of experts have no balancing loss, which is a product of means over the rows of one replica.
"""

import functools
import inspect
import re
from typing import Any

import keras
import numpy as np

import distloop

ROWS, CLASSES, TOKENS, VOCABULARY = 8, 10, 8, 32
LEARNING_RATE, MOMENTUM = 1e-3, 0.9
IMAGE_SIZES = {"InceptionResNetV2": 75, "InceptionV3": 75, "Xception": 71}  # the smallest that they accept

# Arguments of KerasHub's backbones by name, for all backbones that have them.
SMALL: dict[str, Any] = dict(
    vocabulary_size=VOCABULARY, vocab_size=VOCABULARY, max_sequence_length=16, max_position_embeddings=16,
    num_layers=1, num_layers_enc=1, num_layers_dec=1, encoder_num_layers=1, decoder_num_layers=1,
    num_heads=2, num_attention_heads=2, num_query_heads=2, num_key_value_heads=1, head_dim=8, head_size=8,
    encoder_num_heads=2, decoder_num_heads=2, encoder_num_attention_heads=2, decoder_num_attention_heads=2,
    encoder_num_key_value_heads=1, decoder_num_key_value_heads=1, encoder_head_dim=8, decoder_head_dim=8,
    encoder_layer_types=["full_attention"], decoder_layer_types=["full_attention"],
    hidden_dim=16, hidden_size=16, embedding_dim=8, filter_dim=32,
    encoder_hidden_dim=16, decoder_hidden_dim=16, encoder_intermediate_dim=32, decoder_intermediate_dim=32,
    intermediate_dim=32, mlp_dim=32, moe_intermediate_dim=16, shared_expert_intermediate_dim=16,
    shared_expert_intermediate_size=16, num_experts=2, top_k=1,
    router_aux_loss_coef=0.0, router_aux_loss_coefficient=0.0,
    linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    image_size=16, image_shape=(32, 32, 3), patch_size=8, dropout=0.0, dropout_rate=0.0, attention_dropout=0.0,
    max_encoder_sequence_length=TOKENS, max_decoder_sequence_length=TOKENS, num_mels=8, bucket_size=4,
    attention_bias=False, mlp_bias=False, layer_norm_epsilon=1e-6, rope_theta=1e4, partial_rotary_factor=1.0,
    rope_layer_enabled_list=[True], sliding_window_size=4, sliding_window=4, max_drop_path_rate=0.0,
    use_mask_token=False, gate_lora=4, mv_lora=4, aaa_lora=4, decay_lora=4,
)  # fmt: skip

# Backbone -> arguments that it alone has, or needs otherwise.
BACKBONES: dict[str, dict[str, Any]] = {
    **{
        f"{name}Backbone": {}
        for name in (
            "Albert Bart Bert Bloom DebertaV3 DINOV2 DINOV3 DeiT DistilBert ESM ESM2 EdRec Electra FNet Falcon GPT2 "
            "GPTNeoX Gemma GptOss Llama Llama3 Mistral Mixtral OPT Phi3 Qwen Qwen3 Qwen3Moe Qwen3_5 "
            "QwenMoe RWKV7 Roberta RoformerV2 T5 T5Gemma ViT Whisper XLMRoberta XLNet"
        ).split()
    },
    "Gemma3Backbone": {"vision_encoder": None},
    "SmolLM3Backbone": {"layer_types": ["full_attention"]},
    "DenseNetBackbone": {"stackwise_num_repeats": [1, 1], "growth_rate": 8},
    "ResNetBackbone": {
        "input_conv_filters": [64],
        "input_conv_kernel_sizes": [3],
        "stackwise_num_filters": [64, 128],
        "stackwise_num_blocks": [1, 1],
        "stackwise_num_strides": [1, 2],
        "block_type": "basic_block",
    },
    "VGGBackbone": {"stackwise_num_repeats": [1, 1], "stackwise_num_filters": [8, 16]},
    "SwinTransformerBackbone": {
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [2, 2],
        "window_size": 2,
        "drop_path": 0.0,
    },
    "MiTBackbone": {
        "layerwise_depths": [1, 1],
        "num_layers": 2,
        "layerwise_num_heads": [1, 2],
        "layerwise_sr_ratios": [2, 1],
        "layerwise_patch_sizes": [7, 3],
        "layerwise_strides": [4, 2],
        "hidden_dims": [8, 16],
    },
}
ARCHITECTURES = sorted(name for name in dir(keras.applications) if name[0].isupper())

# The small form of an architecture -> the last of the first layers that it consists of: they are of all kinds that the
# architecture has.
LAST_LAYERS = {
    "small/ConvNeXtTiny": "convnext_tiny_stage_1_block_0_identity",
    "small/DenseNet121": "conv3_block1_concat",
    "small/EfficientNetB0": "block3b_add",
    "small/EfficientNetV2B0": "block4b_add",
    "small/InceptionResNetV2": "block35_2_ac",
    "small/InceptionV3": "mixed4",
    "small/MobileNet": "conv_pw_3_relu",
    "small/MobileNetV2": "block_3_project_BN",
    "small/MobileNetV3Small": "expanded_conv_4_add",
    "small/NASNetMobile": "normal_concat_0",
    "small/ResNet50": "conv3_block2_out",
    "small/ResNet50V2": "conv3_block2_out",
    "small/VGG16": "block2_pool",
    "small/Xception": "block5_sepconv1_act",
}
NAMES = [*ARCHITECTURES, *LAST_LAYERS, *(f"hub/{name}" for name in sorted(BACKBONES))]

# The model that stands for a family -> the other members: the same blocks in other numbers, or nearly.
FAMILIES = {
    "small/ConvNeXtTiny": "ConvNeXt.*",
    "small/DenseNet121": "DenseNet.*",
    "small/EfficientNetB0": "EfficientNetB.*",
    "small/EfficientNetV2B0": "EfficientNetV2.*",
    "small/InceptionResNetV2": "InceptionResNetV2",
    "small/InceptionV3": "InceptionV3",
    "small/MobileNet": "MobileNet",
    "small/MobileNetV2": "MobileNetV2",
    "small/MobileNetV3Small": "MobileNetV3.*",
    "small/NASNetMobile": "NASNet.*",
    "small/ResNet50": r"ResNet\d+",
    "small/ResNet50V2": r"ResNet\d+V2",
    "small/VGG16": r"VGG\d+",
    "small/Xception": "Xception",
    "hub/BertBackbone": ("hub/(Albert|DebertaV3|DistilBert|ESM2?|Electra|FNet|(XLM)?Roberta|RoformerV2|XLNet)Backbone"),
    "hub/GPT2Backbone": "hub/(Bloom|Falcon|GPTNeoX|OPT)Backbone",
    "hub/LlamaBackbone": "hub/(Gemma3?|Llama3|Mistral|Phi3|Qwen|Qwen3|Qwen3_5|RWKV7|SmolLM3)Backbone",
    "hub/ResNetBackbone": "hub/(DenseNet|VGG)Backbone",
    "hub/T5Backbone": "hub/(Bart|EdRec|T5Gemma|Whisper)Backbone",
    "hub/ViTBackbone": "hub/(DINOV[23]|DeiT|MiT|SwinTransformer)Backbone",
}


def is_eager(name: str) -> bool:
    """Returns whether a model is of keras.applications, or a small form: tracing their graphs takes minutes."""
    return name in ARCHITECTURES or name in LAST_LAYERS


def representative_of(name: str, cell: str) -> str:
    """Returns the model that has a cell of the table for a model's family; the model itself, where no other has it."""
    of_family = ("replicas_4", "mixed_float16", "mixed_bfloat16", "split")
    if cell not in of_family and name not in ARCHITECTURES:
        return name
    return next((model for model, members in FAMILIES.items() if re.fullmatch(members, name)), name)


def make(name: str) -> keras.Model:
    """Returns a compiled classifier with logits of 10 classes."""
    kind, _, own_name = name.rpartition("/")
    model = {"": _architecture, "small": _small, "hub": _backbone}[kind](own_name)
    for layer in model._flatten_layers():
        for rate in ("rate", "drop_path_rate"):
            if getattr(layer, rate, 0.0):
                setattr(layer, rate, 0.0)
    model.compile(
        keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return distloop.synchronize(model)


def batch_for(model: keras.Model) -> tuple[Any, np.ndarray]:
    """Returns random inputs for a model, in its structure, and labels `[ROWS]`."""
    rng = np.random.default_rng(0)

    def values(tensor: Any) -> np.ndarray:
        shape = [ROWS, *(size or TOKENS for size in tensor.shape[1:])]
        if "mask" in tensor.name:
            return np.ones(shape, "int32")
        if "int" in tensor.dtype:
            return rng.integers(0, 2 if "segment" in tensor.name else VOCABULARY, shape).astype("int32")
        return rng.normal(size=shape).astype(keras.config.floatx())

    return keras.tree.map_structure(values, model.input), rng.integers(0, CLASSES, ROWS)


def _architecture(name: str) -> keras.Model:
    constructor = getattr(keras.applications, name)
    size = IMAGE_SIZES.get(name, 32)
    arguments = {"dropout": 0.0, "include_preprocessing": False}
    arguments = {key: arguments[key] for key in arguments if key in inspect.signature(constructor).parameters}
    shape = (size, size, 3)
    return constructor(weights=None, input_shape=shape, classes=CLASSES, classifier_activation=None, **arguments)


def _small(name: str) -> keras.Model:
    config = _small_config(name, keras.config.dtype_policy().name)
    return keras.Model.from_config(dict(config))  # it takes keys out


@functools.cache  # the whole architecture is built once
def _small_config(name: str, _: str) -> dict[str, Any]:
    whole = _architecture(name)
    features = whole.get_layer(LAST_LAYERS[f"small/{name}"]).output  # [B, H, W, C]
    features = keras.layers.GlobalAveragePooling2D()(features)  # [B, C]
    return keras.Model(whole.input, keras.layers.Dense(CLASSES)(features), name="model").get_config()


def _backbone(name: str) -> keras.Model:
    import keras_hub  # the extra `public-models`

    backbone_class = getattr(keras_hub.models, name)
    arguments = {key: SMALL[key] for key in inspect.signature(backbone_class).parameters if key in SMALL}
    backbone = backbone_class(**{**arguments, **BACKBONES[name]})
    features = [tensor for tensor in keras.tree.flatten(backbone.output) if "float" in tensor.dtype][-1]  # [B, ..., D]
    if len(features.shape) > 2:
        features = keras.layers.Reshape((-1, features.shape[-1]))(features)
        features = keras.layers.GlobalAveragePooling1D()(features)  # [B, D]
    return keras.Model(backbone.input, keras.layers.Dense(CLASSES, dtype=keras.config.floatx())(features), name="model")
