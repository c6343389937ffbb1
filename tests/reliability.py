"""What the server withstands, as the names of the tests that show it: `python -m tests.reliability [AREA]`.

Figures come from load tests: `python -m loadtests idle`, `victim` and `soak`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
# Files of tests by area; of a file that is mostly about something else, single tests.
AREAS = {
    "Connections and bodies": (
        "server/test_wire.py",
        "server/http/test_connections.py",
        "server/http/test_framing_fuzz.py",
        "server/test_refusals.py::test_a_body_over_the_limit_is_413_whether_announced_or_not",
    ),
    "Keys, names and origins": (
        "server/test_auth.py",
        "server/test_tenants.py",
        "server/media/test_reader.py::test_whether_a_picture_was_seen_before_no_key_learns_of_another",
        "server/test_cors.py",
        "server/http/test_hosts.py",
        "server/test_unix_socket.py",
        "server/http/test_connections.py::test_a_long_path_is_cut_in_the_log",
        "server/test_lora.py::test_nothing_is_loaded_from_elsewhere",
        "server/test_lora.py::test_the_first_request_for_a_folder_loads_it",
        "runtime/lora/test_peft_folder.py",
        "runtime/lora/test_adapters.py::test_a_bad_adapter_is_refused_and_nothing_else_notices",
        "runtime/lora/test_slots.py::test_whoever_waits_for_a_slot_is_not_overtaken_for_ever",
        "server/test_small_routes.py::test_the_access_log_names_the_exchange_and_cannot_be_forged",
    ),
    "Requests": (
        "server/test_refusals.py",
        "server/test_costly_bodies.py",
        "server/media/test_fuzzed_media.py",
        "server/media/test_sources.py::test_base64_is_read_in_pieces_as_in_one",
        "server/media/test_reader.py::test_beyond_what_requests_may_hold_together_more_is_refused",
        "server/media/test_reader.py::test_what_nobody_holds_any_more_counts_no_more",
        "server/test_background.py",
        "server/test_offload.py",
        "server/test_prompt_and_ids.py::test_prompts_that_are_long_together_are_prepared_off_the_loop_and_come_in_their_order",
        "server/test_prompt_and_ids.py::test_requests_are_made_and_handed_to_the_engine_in_turns_of_their_own",
        "runtime/test_long_prompts.py::test_ids_of_many_answers_to_one_prompt_are_looked_at_once",
        "server/test_beam_requests.py::test_others_have_their_turn_while_many_beams_ask",
        "runtime/test_engine.py::test_answers_that_nobody_reads_any_more_are_logged_together",
        "server/http/test_long_json.py",
        "server/test_scoring.py::test_what_was_written_of_a_prompts_scores_is_let_go_of_in_pieces",
        "server/test_text_pieces.py",
        "server/pooling/test_comparing.py::test_a_long_query_for_many_documents_is_not_tokenised_for_each_and_kept_by_none",
        "server/pooling/test_score_templates.py::test_of_a_query_that_is_far_too_long_no_prompt_writes_more_than_it_may_hold",
        "server/test_user_text.py",
        "server/test_template_bounds.py",
        "server/structured/test_compiler.py",
        "server/test_late_constraints.py",
        "server/test_heap.py::test_memory_for_a_large_body_is_there_before_the_interpreter_is_kept_for_it",
        "server/test_fuzzed_bodies.py",
        "server/nightly/test_made_up_requests.py",
        "server/text/test_tool_parsers.py::test_whatever_a_model_writes_means_the_same_in_any_cuts",
        "server/text/test_reasoning.py::test_any_text_is_split_the_same_in_any_cuts",
        "runtime/policy/test_fairness.py::test_a_thousand_requests_of_one_do_not_starve_the_one_of_another",
        "runtime/policy/test_fairness.py::test_callers_get_alike_whatever_the_length_of_what_they_ask",
        "runtime/test_admission.py::test_a_full_queue_is_full_for_who_filled_it_and_open_for_others_up_to_their_part",
        "runtime/test_admission.py::test_a_key_has_its_tokens_of_a_minute_and_is_told_when_there_are_more",
        "runtime/test_deadlines.py",
        "server/test_request_limits.py",
        "runtime/policy/test_step_budget.py",
        "runtime/policy/test_step_cost.py::test_what_rows_cost_is_learned_though_prompts_go_on_beside_them",
        "runtime/test_scheduler_shares.py::test_a_step_beside_a_stream_holds_so_much_of_others_and_no_more",
        "runtime/policy/test_decode_turns.py",
        "server/test_wire.py::test_a_failure_on_the_way_is_an_event_and_done_still_comes_last",
    ),
    "The process": (
        "server/test_process.py",
        "server/test_ending.py",
        "runtime/test_engine_health.py::test_an_engine_whose_device_is_lost_dies_says_why_and_tells_everybody",
        "e2e/nightly/ray/test_ray_serve.py::test_of_200_streams_those_of_a_killed_replica_say_so_and_all_others_finish",
    ),
    "A model's files": (
        "runtime/weights/test_safetensors_file.py",
        "runtime/weights/test_gguf.py::test_whatever_bytes_are_changed_it_reads_or_refuses",
        "runtime/weights/test_gguf.py::test_cut_off_anywhere_it_is_an_error_and_nothing_else",
        "server/test_tokenizer.py::test_a_broken_file_is_named",
        "runtime/models/test_registry.py::test_what_cannot_be_served_is_refused_by_name",
    ),
    "Memory": (
        "server/text/test_native.py::test_a_writer_that_its_connection_knows_is_collected_with_it",
        "server/test_offload.py::test_what_work_raised_keeps_nothing_of_what_was_worked_on",
        "server/test_offload.py::test_memory_is_given_back_once_after_very_long_work_and_not_on_the_loop",
        "server/structured/test_compiler.py::test_what_fails_to_compile_keeps_nothing_of_the_library_s",
        "server/structured/test_compiler.py::test_memory_of_long_grammars_is_given_back",
        "server/test_heap.py",
    ),
    "Beside a stream": (
        "runtime/policy/test_step_budget.py",
        "server/media/test_embeds.py",
        "server/media/test_over_http.py::test_how_pictures_are_processed_has_bounds",
    ),
    "Steps": (
        "runtime/test_engine_health.py",
        "server/test_health.py",
        "runtime/runner/test_faults.py",
        "runtime/test_chaos.py",
        "runtime/encode/test_scheduling.py::test_the_last_token_of_a_prompt_waits_for_its_picture_though_it_is_alone_like_a_decode",
        "runtime/test_mask_maker.py",
        "ops/test_op_program.py",
    ),
}


def tests_of(entry: str) -> list[str]:
    """Return the names of the tests that an entry of `AREAS` names: of its file, or one. Raises OSError without the file."""
    path, _, name = entry.partition("::")
    tree = ast.parse((TESTS / path).read_text())
    found = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]
    return [each for each in found if not name or each == name]


def sentences(area: str) -> Iterator[str]:
    for entry in AREAS[area]:
        for name in tests_of(entry):
            yield name.removeprefix("test_").replace("_", " ")


def main() -> None:
    for area in sys.argv[1:] or AREAS:
        print(f"\n{area}", *sentences(area), sep="\n  ")


if __name__ == "__main__":
    main()
