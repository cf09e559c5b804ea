"""Our messages for Envoy carry the numbers and types of Envoy's own API (tests/data/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

from emberkv_proto.v1 import envoy_pb2 as pb

THEIRS: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data/envoy_fields.json").read_text()
)
OURS: dict[str, Descriptor] = dict(pb.DESCRIPTOR.message_types_by_name)
ENUM_AS_NUMBER = {("HttpStatus", "code"): "StatusCode"}


@pytest.mark.parametrize("name", OURS)
def test_every_field_is_one_of_theirs(name: str) -> None:
    ours, theirs = DescriptorProto(), THEIRS["messages"][name]
    OURS[name].CopyToProto(ours)
    for field in ours.field:
        number, kind, repeated = theirs[field.name]
        assert field.number == number, field.name
        assert (field.label == FieldDescriptorProto.LABEL_REPEATED) == repeated, field.name
        named = field.type_name.rpartition(".")[2]
        simple = FieldDescriptorProto.Type.Name(field.type)[len("TYPE_") :].lower()
        assert ENUM_AS_NUMBER.get((name, field.name), named or simple) == kind, field.name


def test_every_enum_value_is_theirs() -> None:
    assert dict(pb.BodySendMode.items()) == THEIRS["enums"]["BodySendMode"]
    actions = dict(pb.HeaderValueOption.HeaderAppendAction.items())
    assert actions == THEIRS["enums"]["HeaderAppendAction"]
    states = dict(pb.HealthCheckResponse.ServingStatus.items())
    assert states == THEIRS["enums"]["ServingStatus"]
