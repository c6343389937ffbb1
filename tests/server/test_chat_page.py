"""The chat page's script, run by Node over the least of a document, against a server: what it sends and what it shows."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

import server
from tests.server.test_reasoning_chats import SAYS, thinker

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node")
PAGE = (Path(server.__file__).parent / "web" / "index.html").read_text()
SCRIPT = re.search(r"<script>\n(.*?)</script>", PAGE, re.DOTALL).group(1)
DOCUMENT = """
class Element {
  constructor(id) { this.id = id; this.children = []; this.own = ""; this.value = ""; this.listeners = {}; }
  get textContent() { return this.own + this.children.map(child => child.textContent).join(""); }
  set textContent(text) { this.own = text; this.children = []; }
  append(...children) { this.children.push(...children); }
  prepend(child) { this.children.unshift(child); }
  replaceChildren(...children) { this.children = children; }
  remove() { const log = document.getElementById("log"); log.children = log.children.filter(child => child !== this); }
  scrollIntoView() {} focus() {}
  addEventListener(name, listener) { this.listeners[name] = listener; }
}
const elements = {};
globalThis.document = {
  hidden: true, createElement: () => new Element(),
  getElementById: id => elements[id] ??= new Element(id),
};
const reached = fetch;
const setTimeout = () => {};  // nothing is polled
globalThis.fetch = (path, options) => reached(BASE + path, options);
const shown = () => elements.log.children.map(child => child.textContent);
const until = async done => { while (!done()) await new Promise(resolve => setImmediate(resolve)); };
"""


async def page(running, steps: str) -> list:
    """What `steps`, which go on where the page's script ends, print as JSON."""
    body = f"{DOCUMENT}{SCRIPT}; (async () => {{ {steps}; process.exit(0); }})();"
    program = (
        f"((BASE) => {{ {body} }})('http://127.0.0.1:{running.port}');"  # a scope of its own: Node needs its timers
    )
    process = await asyncio.create_subprocess_exec(
        NODE, "--input-type=commonjs", "-", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate(program.encode())
    assert process.returncode == 0
    return json.loads(out)


async def test_a_new_chat_knows_nothing_of_the_answer_it_broke_off(serve):
    server = await serve(
        script=lambda request: [*server.tokenizer.encode("Once upon a time "), *[40] * 400], max_model_len=2048
    )
    sent = await page(
        server,
        """
        const first = ask("A story");
        await until(() => shown().length > 2 || shown()[1]?.startsWith("Once upon"));
        elements.clear.listeners.click();
        const second = ask("hello");
        const sent = structuredClone(messages);
        await first;
        running.abort();
        await second;
        console.log(JSON.stringify([sent, messages, shown()[0]]));
        """,
    )
    assert sent[0] == [{"role": "user", "content": "hello"}]
    assert [message["role"] for message in sent[1]] in (["user", "assistant"], [])
    assert sent[2] == "hello"
    prompts = [server.tokenizer.decode(request.prompt_ids) for request in server.engine.submitted]
    assert not [prompt for prompt in prompts[1:] if "Once upon" in prompt or "A story" in prompt]


async def test_what_the_model_thinks_is_shown_and_not_sent_back(serve):
    server = await serve(SAYS, speaks=thinker())
    shown, kept = await page(server, 'await ask("Hi"); console.log(JSON.stringify([shown(), messages]));')
    assert shown[1] == "ThinkingHm.Yes."
    assert kept == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    assert "tokens/s" in shown[2]


async def test_an_answer_that_ends_in_its_thoughts_says_so(serve):
    server = await serve(SAYS.partition("Hm.")[0] + "Hm. " * 10, speaks=thinker(), max_model_len=64)
    shown, kept = await page(server, 'await ask("Hi"); console.log(JSON.stringify([shown(), messages]));')
    assert shown[1].startswith("ThinkingHm.")
    assert shown[2].startswith("No answer: ")
    assert kept == []
