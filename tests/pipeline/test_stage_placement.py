"""How busy each device was, in a profile made up here."""

from tensorflow.tsl.profiler.protobuf import xplane_pb2

from distloop.pipeline.stage_placement import busy_fractions

DEVICE = "/job:localhost/replica:0/task:0/device:"


def add_line(plane, name, events):
    """Adds a thread with events: name, start and end in picoseconds, stats."""
    line = plane.lines.add(name=name)
    for name, start, end, stats in events:
        plane.event_metadata[len(plane.event_metadata) + 1].name = name
        event = line.events.add(metadata_id=len(plane.event_metadata), offset_ps=start, duration_ps=end - start)
        for key, value in stats.items():
            plane.stat_metadata[len(plane.stat_metadata) + 1].name = key
            event.stats.add(metadata_id=len(plane.stat_metadata), str_value=str(value))


def subgraph(number, start, end):
    return ("ExecutorState::Process", start, end, {"id": 7, "_c": number})


def write(space, directory):
    path = directory / "plugins" / "profile" / "now" / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(space.SerializeToString())


def two_stages(devices=("CPU:0", "CPU:1")):
    """A step of 100 ps in two threads; what each subgraph runs and sends."""
    space = xplane_pb2.XSpace()
    plane = space.planes.add(name="/host:CPU")
    first, second = ({"key": f"{DEVICE}{device};and;others"} for device in devices)
    add_line(plane, "python", [("train", 0, 100, {})])
    one = [subgraph("a", 0, 40), ("x/MatMul:MatMul", 0, 20, {}), ("x/_1:_Send", 20, 30, first)]
    one += [("Outside:Add", 45, 50, {}), subgraph("b", 60, 90), ("y/MatMul:MatMul", 60, 80, {})]
    add_line(plane, "tf_Compute/1", one)
    two = [subgraph("b", 70, 100), ("y/Add:AddV2", 70, 90, {}), ("IteratorGetNext:IteratorGetNext", 90, 99, {})]
    add_line(plane, "tf_Compute/2", [*two, ("y/_2:_Send", 99, 100, second)])
    return space


def test_operations_of_a_subgraph_count_for_the_device_that_sent_it(tmp_path):
    assert busy_fractions(str(tmp_path)) == {}  # without a profile
    write(two_stages(), tmp_path)
    assert busy_fractions(str(tmp_path)) == {"CPU:0": 0.3, "CPU:1": 0.31}


def test_a_gpu_is_busy_while_its_kernels_run(tmp_path):
    space = two_stages(("GPU:0", "CPU:0"))
    plane = space.planes.add(name="/device:GPU:0")
    add_line(plane, "Stream #1(Compute)", [("kernel", 10, 60, {}), ("kernel", 50, 70, {})])
    add_line(plane, "Steps", [("1", 0, 100, {})])
    write(space, tmp_path)
    assert busy_fractions(str(tmp_path)) == {"GPU:0": 0.6, "CPU:0": 0.31}
