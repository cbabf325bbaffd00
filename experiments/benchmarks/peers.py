"""What one would take in place of TensorFlow: JAX, Keras on JAX, PyTorch, Lightning; each in a process of its own."""

from experiments.benchmarks import other_process

# Environment -> what it needs besides TensorFlow and Keras, and what the environment's processes are told.
PACKAGES = {"jax": ["jax", "jaxlib"], "torch": ["torch==2.13.0", "lightning"]}
VARIABLES = {
    "jax": {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
    "torch": {"CUDA_VISIBLE_DEVICES": "-1"},
}
# System -> its environment.
SYSTEMS = {
    "jax": "jax",
    "scan": "jax",
    "keras_jax": "jax",
    "keras_jax50": "jax",
    "torch": "torch",
    "torch_compiled": "torch",
    "lightning": "torch",
}
LEAST = {"scan": 50, "keras_jax50": 50}  # steps that a system trains at once


def make_environment(name: str) -> None:
    """Creates the environment of a system if it is missing.

    Raises:
        RuntimeError: if its packages cannot be installed or imported.
    """
    kind = SYSTEMS[name]
    module = "lightning" if kind == "torch" else kind
    other_process.make_environment(kind, PACKAGES[kind], module, VARIABLES[kind])


def make(
    name: str, workload: str, replicas: int, on_gpu: bool = False, kind_of_call: str = "fit"
) -> other_process.OtherProcess:
    """Returns a system on so many devices: virtual CPUs of JAX, or processes of PyTorch; or on one GPU.

    Keras on JAX can `evaluate` and `predict`, too: its steps are then whole calls.
    """
    kind = SYSTEMS[name]
    command = [other_process.python_of(kind), "-m", f"experiments.benchmarks.{kind}_process", name, workload]
    variables = dict(VARIABLES[kind])
    if on_gpu:
        variables = {"KERAS_BACKEND": "jax", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if kind == "jax" and replicas > 1:
        # With a thread for each core, steps of several virtual CPUs wait for one another's threads without end.
        variables |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count={replicas}", "NPROC": str(3 * replicas)}
    arguments = [str(replicas)] + ([kind_of_call] if kind_of_call != "fit" else [])
    return other_process.OtherProcess([*command, *arguments], variables, LEAST.get(name, 1))
