"""Messages of KServe's v2 protocol over gRPC (the open inference protocol), with Triton's
additions.

The descriptors are built from a table, in a separate pool, because a program may contain another
copy of the protocol. Each line is a message and its fields, `number name type`; `*` means repeated,
`map` a map from text to parameters, `|` a member of a oneof. Fields missing here are kept by
protobuf as unknown fields, without effect.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SERVICE = "inference.GRPCInferenceService"

_TABLE = """
ServerLiveRequest
ServerLiveResponse 1 live bool
ServerReadyRequest
ServerReadyResponse 1 ready bool
ModelReadyRequest 1 name string, 2 version string
ModelReadyResponse 1 ready bool
ServerMetadataRequest
ServerMetadataResponse 1 name string, 2 version string, 3 extensions *string
ModelMetadataRequest 1 name string, 2 version string
ModelMetadataResponse 1 name string, 2 versions *string, 3 platform string, 4 inputs *TensorMetadata, 5 outputs *TensorMetadata
TensorMetadata 1 name string, 2 datatype string, 3 shape *int64
InferParameter 1 bool_param bool |, 2 int64_param int64 |, 3 string_param string |, \
4 double_param double |, 5 uint64_param uint64 |
InferTensorContents 1 bool_contents *bool, 2 int_contents *int32, 3 int64_contents *int64, 4 uint_contents *uint32, \
5 uint64_contents *uint64, 6 fp32_contents *float, 7 fp64_contents *double, 8 bytes_contents *bytes
InferInputTensor 1 name string, 2 datatype string, 3 shape *int64, 4 parameters map, 5 contents InferTensorContents
InferRequestedOutputTensor 1 name string, 2 parameters map
InferOutputTensor 1 name string, 2 datatype string, 3 shape *int64, 4 parameters map, 5 contents InferTensorContents
ModelInferRequest 1 model_name string, 2 model_version string, 3 id string, 4 parameters map, \
5 inputs *InferInputTensor, 6 outputs *InferRequestedOutputTensor, 7 raw_input_contents *bytes
ModelInferResponse 1 model_name string, 2 model_version string, 3 id string, 4 parameters map, \
5 outputs *InferOutputTensor, 6 raw_output_contents *bytes
ModelStreamInferResponse 1 error_message string, 2 infer_response ModelInferResponse
ModelConfigRequest 1 name string, 2 version string
ModelConfigResponse 1 config ModelConfig
ModelConfig 1 name string, 2 platform string, 17 backend string, 4 max_batch_size int32, \
5 input *ModelInput, 6 output *ModelOutput, \
19 model_transaction_policy ModelTransactionPolicy
ModelInput 1 name string, 2 data_type int32, 4 dims *int64, 8 optional bool
ModelOutput 1 name string, 2 data_type int32, 3 dims *int64
ModelTransactionPolicy 1 decoupled bool
RepositoryIndexRequest 1 repository_name string, 2 ready bool
RepositoryIndexResponse 1 models *ModelIndex
ModelIndex 1 name string, 2 version string, 3 state string, 4 reason string
"""


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="slipstream_kserve.proto", package="inference", syntax="proto3"
    )
    for line in _TABLE.strip().splitlines():
        name, _, rest = line.partition(" ")
        message = file.message_type.add(name=name)
        for spec in filter(None, rest.split(", ")):
            _add_field(message, *spec.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = [message.name for message in file.message_type]
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"inference.{name}"))
        for name in names
    }


def _add_field(message: Any, number: str, name: str, kind: str, *more: str) -> None:
    field = message.field.add(name=name, number=int(number), label=1)
    if kind == "map":
        entry = message.nested_type.add(
            name="".join(part.title() for part in name.split("_")) + "Entry"
        )
        entry.options.map_entry = True
        entry.field.add(
            name="key", number=1, label=1, type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING
        )
        entry.field.add(name="value", number=2, label=1, type_name=".inference.InferParameter")
        field.label, field.type_name = 3, f".inference.{message.name}.{entry.name}"
        return
    if more:  # member of a oneof
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if kind.startswith("*"):
        field.label, kind = 3, kind[1:]
    if kind[0].isupper():
        field.type_name = f".inference.{kind}"
    else:
        field.type = descriptor_pb2.FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")


MESSAGES = _classes()
