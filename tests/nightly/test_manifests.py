"""Manifests of `server/deploy/`, checked by the schemas of the tools that read them."""

from __future__ import annotations

import pytest

from tests.server.test_deploy import DEPLOY, KUBERNETES, documents


@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("name", KUBERNETES)
def test_every_field_of_the_manifests_is_one_of_kubernetes(name, version):
    """Sidecars came with 1.29. The package has the schemas of each release in it."""
    judge = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate (see .ci/run)")
    for document in documents(name):
        judge.validate(document, version, strict=True)
    broken = {**document, "spec": {**document["spec"], "replica": 1}}
    with pytest.raises(judge.ValidationError, match="replica"):
        judge.validate(broken, version, strict=True)


def test_every_field_of_the_compose_file_is_one_of_the_compose_specification():
    judge = pytest.importorskip("compose_spec", reason="needs compose-spec (see .ci/run)")
    text = (DEPLOY / "compose.yaml").read_text()
    found = judge.PyCompose.from_yaml(text)
    found.validate()
    found.validate_volumes()
    assert set(found.service_names()) == {"oneloop", "gpu"}
    with pytest.raises(ValueError, match="stop_grace"):
        judge.PyCompose.from_yaml(text.replace("stop_grace_period", "stop_grace"))
