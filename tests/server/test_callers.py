"""Who asks, as the engine learns it: a key, or an address where there are none; never the key itself."""

from __future__ import annotations

import pytest

from server.http.call import Call

KEY, OTHER, ADMIN = "sk-one", "sk-other", "sk-admin"


async def test_each_key_is_a_caller_of_its_own_on_every_route(serve):
    server = await serve(api_key=(KEY, OTHER), admin_api_key=ADMIN)
    for key in (KEY, OTHER, KEY, ADMIN):
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": None, "max_tokens": 1}
        assert (await server.post("/v1/completions", body | {"prompt": "Hi"}, headers=headers)).status_code == 200
    headers = {"x-api-key": KEY}
    messages = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    assert (await server.post("/v1/chat/completions", messages, headers=headers)).status_code == 200
    assert (await server.post("/v1/messages", messages | {"model": "m"}, headers=headers)).status_code in (200, 404)
    assert (
        await server.post("/v1/responses", {"input": "Hi", "max_output_tokens": 1}, headers=headers)
    ).status_code == 200
    one, other, again, admin, *rest = [request.caller for request in server.engine.submitted]
    assert None not in {one, other, admin}
    assert len({one, other, admin}) == 3
    assert {again, *rest} == {one}
    assert KEY.encode() not in one


async def test_without_keys_an_address_is_a_caller(serve):
    server = await serve()
    await server.complete(max_tokens=1)
    assert [request.caller for request in server.engine.submitted] == [bytes([127, 0, 0, 1])]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8:0:1::5", "2001:db8:0:1:ffff::6", True),
        ("2001:db8:0:1::5", "2001:db8:0:2::5", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
    ],
)
def test_an_ipv6_caller_is_a_network_since_one_client_has_all_of_it(one, other, same):
    assert (Call(address=one).caller == Call(address=other).caller) == same


@pytest.mark.parametrize("client", [None, ("", 0)])
async def test_over_a_unix_socket_all_are_one_caller(client):
    call = Call()
    call.begin({"client": client, "headers": []})
    assert call.caller == b"unix"


async def test_a_program_of_ours_is_no_caller():
    call = Call()
    call.begin({"headers": []})
    assert call.caller is None
