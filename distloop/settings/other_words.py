"""Other words for settings: what Keras, Lightning and Hugging Face call a field of `Config`."""

_WORDS = {
    "epochs": "max_epochs num_epochs n_epochs nb_epoch num_train_epochs epoch",
    "steps": "max_steps num_steps train_steps step",
    "until": "max_time",
    "replica_batch_size": "per_device_train_batch_size",
    "num_devices": "devices gpus num_gpus num_replicas",
    "device": "accelerator",
    "microbatches": "accumulate_grad_batches gradient_accumulation_steps",
    "clip_norm": "gradient_clip_val max_grad_norm global_clipnorm",
    "average_decay": "ema_decay ema_momentum",
    "eval_every": "val_check_interval check_val_every_n_epoch validation_freq eval_steps",
    "limit_eval_batches": "limit_val_batches validation_steps",
    "log_every": "log_every_n_steps logging_steps",
    "checkpoint_every": "save_steps",
    "keep_checkpoints": "save_total_limit max_to_keep",
    "workdir": "default_root_dir output_dir model_dir log_dir",
    "console": "verbose enable_progress_bar",
    "locate_nonfinite": "detect_anomaly",
    "steps_per_loop": "steps_per_execution",
}
SETTINGS = {word: name for name, words in _WORDS.items() for word in words.split()}  # by the other word
