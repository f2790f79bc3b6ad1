# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Horovod's public functions of TensorFlow, Keras and MXNet with their arguments, in its order and with its defaults.

`G` is the global process set, `C` no compression.
"""

import inspect

_COMMON = """
init shutdown is_initialized size rank local_size local_rank cross_size cross_rank is_homogeneous mpi_threads_supported
mpi_enabled gloo_enabled mpi_built gloo_built ddl_built ccl_built cuda_built rocm_built nccl_built start_timeline
stop_timeline ProcessSet add_process_set remove_process_set global_process_set Average Sum Compression
"""
COMMON = _COMMON.split()
SIX = ["Adasum", "Min", "Max", "Product"]

_REDUCED = "compression=C, op=None, prescale_factor=1.0, postscale_factor=1.0"
_DEVICES = "device_dense='', device_sparse='', compression=C, sparse_as_dense=False"
_AGGREGATED = "backward_passes_per_step=1, op=0, gradient_predivide_factor=1.0, average_aggregated_gradients=False"
_TAPE = f"{_DEVICES}, op=0, gradient_predivide_factor=1.0, num_groups=0, groups=None, process_set=G"

TENSORFLOW = {
    "allreduce": f"tensor, average=None, device_dense='', device_sparse='', {_REDUCED}, name=None, process_set=G, "
    "ignore_name_scope=False",
    "grouped_allreduce": f"tensors, average=None, device_dense='', device_sparse='', {_REDUCED}, process_set=G, "
    "ignore_name_scope=False, name=None",
    "allgather": "tensor, name=None, ignore_name_scope=False, process_set=G",
    "grouped_allgather": "tensors, name=None, ignore_name_scope=False, process_set=G",
    "broadcast": "tensor, root_rank, name=None, ignore_name_scope=False, process_set=G",
    "broadcast_": "variables, root_rank, name=None, process_set=G",
    "alltoall": "tensor, splits=None, name=None, ignore_name_scope=False, process_set=G",
    "reducescatter": "tensor, device_dense='', compression=C, op=0, name=None, process_set=G, ignore_name_scope=False, "
    "prescale_factor=1.0, postscale_factor=1.0",
    "grouped_reducescatter": "tensors, device_dense='', compression=C, op=0, process_set=G, prescale_factor=1.0, "
    "postscale_factor=1.0",
    "join": "",
    "size_op": "process_set_id=0, name=None",
    "process_set_included_op": "process_set_id=0, name=None",
    "rank_op": "name=None",
    "local_rank_op": "name=None",
    "local_size_op": "name=None",
    "broadcast_variables": "variables, root_rank, process_set=G, inplace=False",
    "broadcast_object": "obj, root_rank=0, session=None, name=None, process_set=G",
    "broadcast_object_fn": "root_rank=0, session=None, name=None, process_set=G",
    "allgather_object": "obj, session=None, name=None, process_set=G",
    "broadcast_global_variables": "root_rank",
    "BroadcastGlobalVariablesHook": "root_rank, device=''",
    "SyncBatchNormalization": "fused=False",
    "DistributedOptimizer": f"optimizer, name=None, use_locking=False, {_DEVICES}, {_AGGREGATED}, num_groups=0, "
    "groups=None, process_set=G, scale_local_gradients=True",
    "DistributedGradientTape": f"gradtape, {_TAPE}, scale_local_gradients=True",
    "PartialDistributedGradientTape": f"gradtape, {_TAPE}, local_layers=None, scale_local_gradients=True",
    "LocalGradientAggregationHelper": "backward_passes_per_step, allreduce_func, sparse_as_dense, "
    "average_aggregated_gradients, rank=0",
    "check_num_rank_power_of_2": "num_rank",
    "handle_average_backwards_compatibility": "op, average",
    "gpu_available": "ext_base_name='tensorflow', verbose=False",
    "split_list": None,
    "elastic.run": "func",
    "elastic.TensorFlowState": "variables=None, session=None",
    "elastic.TensorFlowKerasState": "model, optimizer=None",
}

_CALLBACKS = {
    "BroadcastGlobalVariablesCallback": "root_rank, device='', local_variables=None",
    "MetricAverageCallback": "device=''",
    "LearningRateScheduleCallback": "initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, "
    "momentum_correction=True, steps_per_epoch=None",
    "LearningRateWarmupCallback": "initial_lr, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, "
    "verbose=0",
    "BestModelCheckpoint": "monitor='val_loss', verbose=0, save_weights_only=False, mode='auto', save_freq='epoch'",
}
_BOTH_KERAS = {
    "allgather": "value, name=None",
    "broadcast": "value, root_rank, name=None",
    "reducescatter": "value, name=None, op=0",
    "broadcast_global_variables": "root_rank",
    "load_model": "filepath, custom_optimizers=None, custom_objects=None, compression=C, legacy_opts=False",
    "elastic.KerasState": "model, optimizer=None",
    "elastic.CommitStateCallback": "state, batches_per_commit=1",
    "elastic.UpdateBatchStateCallback": "state",
    "elastic.UpdateEpochStateCallback": "state",
    "elastic.run": "func",
    **{f"callbacks.{name}": told for name, told in _CALLBACKS.items()},
}
_VALUES = "prescale_factor=1.0, postscale_factor=1.0, op=None, compression=C"
TENSORFLOW_KERAS = {
    **_BOTH_KERAS,
    "DistributedOptimizer": f"optimizer, name=None, {_DEVICES}, gradient_predivide_factor=1.0, op=0, "
    "backward_passes_per_step=1, average_aggregated_gradients=False, num_groups=0, groups=None, process_set=G, "
    "scale_local_gradients=True",
    "allreduce": f"value, name=None, average=None, {_VALUES}",
}
KERAS = {
    **_BOTH_KERAS,
    "DistributedOptimizer": f"optimizer, name=None, {_DEVICES}, gradient_predivide_factor=1.0, op=0, num_groups=0, "
    "groups=None",
    "PartialDistributedOptimizer": f"optimizer, name=None, {_DEVICES}, gradient_predivide_factor=1.0, op=0, "
    "groups=None, process_set=G, local_layers=None, scale_local_gradients=True",
    "allreduce": f"value, name=None, average=True, {_VALUES}",
}

_FACTORS = "prescale_factor=1.0, postscale_factor=1.0, process_set=G"
_MXNET_REDUCED = f"average=None, name=None, priority=0, {_FACTORS}, op=None"
MXNET = {
    "allreduce": f"tensor, {_MXNET_REDUCED}",
    "allreduce_": f"tensor, {_MXNET_REDUCED}",
    "grouped_allreduce": f"tensors, {_MXNET_REDUCED}",
    "grouped_allreduce_": f"tensors, {_MXNET_REDUCED}",
    "allgather": "tensor, name=None, priority=0, process_set=G",
    "grouped_allgather": "tensors, name=None, priority=0, process_set=G",
    "broadcast": "tensor, root_rank, name=None, priority=0, process_set=G",
    "broadcast_": "tensor, root_rank, name=None, priority=0, process_set=G",
    "alltoall": "tensor, splits=None, name=None, priority=0, process_set=G",
    "reducescatter": f"tensor, op=0, name=None, priority=0, {_FACTORS}",
    "grouped_reducescatter": f"tensors, op=0, name=None, priority=0, {_FACTORS}",
    "broadcast_object": "obj, root_rank=0, name=None",
    "allgather_object": "obj, name=None",
    "DistributedOptimizer": "optimizer, gradient_predivide_factor=1.0, num_groups=0, process_set=G",
    "DistributedTrainer": "params, optimizer, optimizer_params=None, compression=C, gradient_predivide_factor=1.0, "
    "prefix=None, num_groups=0, process_set=G",
    "broadcast_parameters": "params, root_rank=0, prefix=None",
}


def _said(parameter):
    value = parameter.default
    if value is parameter.empty:
        return parameter.name
    if type(value).__name__ == "_GlobalProcessSet":
        return f"{parameter.name}=G"
    if parameter.name == "compression" and getattr(value, "__name__", "NoneCompressor") == "NoneCompressor":
        return f"{parameter.name}=C"
    return f"{parameter.name}={value!r}"


def _differs(found, told):
    """What a function takes instead; more may follow, if it need not be given."""
    fixed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [one for one in inspect.signature(found).parameters.values() if one.kind in fixed]
    wanted, ours = told.split(", ") if told else [], [_said(one) for one in parameters]
    more = parameters[len(wanted) :]
    return None if ours[: len(wanted)] == wanted and all(one.default is not one.empty for one in more) else ours


def problems(module, functions, names):
    """What a module lacks of names, and where its functions take other arguments than Horovod's."""
    for name in names:
        if not hasattr(module, name):
            yield f"{module.__name__} lacks {name}"
    for name, told in functions.items():
        found = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            yield f"{module.__name__} lacks {name}"
        elif told is not None and (ours := _differs(found, told)) is not None:
            yield f"{module.__name__}.{name}: {ours}, Horovod's: {told}"
