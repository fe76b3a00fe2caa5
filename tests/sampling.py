"""Which cases of a test are tried where there is no time for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from heapq import heappop, heapreplace
from itertools import combinations

GOLDEN = (5**0.5 - 1) / 2
#: Tests of all there is have an eighth of it each, `names[share::SHARES]`.
SHARES = 8


def sample(cases: Sequence[Sequence[Hashable]], size: int) -> set[int]:
    """Indices of ``size`` cases, each a value for every parameter.

    Every value of a parameter comes before any comes twice, then every pair of values, and all
    about equally often. Neighbours are the most alike: of cases that are as good as one another,
    the first is far from those just before it.

    >>> size_and_side = [(size, side) for size in (1, 2, 3) for side in "ab"]
    >>> [size_and_side[index] for index in sorted(sample(size_and_side, 3))]
    [(1, 'a'), (2, 'a'), (3, 'b')]
    """
    # 1 and True are equal, and two values
    named = [[(place, type(value), value) for place, value in enumerate(case)] for case in cases]
    order = sorted(range(len(cases)), key=lambda index: index * GOLDEN % 1)
    chosen: set[int] = set()
    uses: Counter[Hashable] = Counter()

    def loss(index: int) -> tuple[int, int, int]:
        values = named[index]
        old_values = sum(value in uses for value in values)
        old_pairs = sum(pair in uses for pair in combinations(values, 2))
        return old_values, old_pairs, sum(uses[value] for value in values)

    # no loss ever falls, so what is the least when it is asked for again is the least of all
    waiting = [((0, 0, 0), place, index) for place, index in enumerate(order)]
    while waiting and len(chosen) < size:
        known, place, index = waiting[0]
        now = loss(index)
        if now != known:
            heapreplace(waiting, (now, place, index))
            continue
        heappop(waiting)
        chosen.add(index)
        uses.update(named[index])
        uses.update(combinations(named[index], 2))
    return chosen


#: Tests of many alike cases, by file, and how many of them `make test` and `make check` run: those
#: that `sample` chooses, and none of what costs much and seldom tells more than others do.
#: `make test-slow` runs all.
SAMPLED = {
    "tests/bench/test_layers.py": {
        "test_all_who_are_right_are_timed": 1,
    },
    "tests/bench/test_runs.py": {
        "test_the_other_packages_that_are_installed_rotate_alike": 1,
    },
    "tests/charts/report/test_report.py": {
        "test_any_rope_has_a_page_whose_code_makes_it": 3,
        "test_every_preset_is_reported_with_defaults": 6,
    },
    "tests/charts/test_handles.py": {
        "test_nothing_goes_beyond_the_screen": 3,
    },
    "tests/cli/test_extend.py": {
        "test_a_narrow_terminal_cuts_no_name_and_no_number": 2,
    },
    "tests/cli/test_help.py": {
        "test_a_law_is_taken_in_any_capitals_and_suggested_when_misspelt": 2,
    },
    "tests/cli/test_terminal.py": {
        "test_no_word_is_broken_and_no_line_is_too_long": 9,
    },
    "tests/examples/test_models.py": {
        "test_the_gpt_learns_its_documents": 1,
    },
    "tests/extending/test_extend.py": {
        "test_every_block_reads_back_as_its_rope": 4,
        "test_the_stated_rope_turns_as_the_compared_one": 4,
    },
    "tests/files/checkpoint/test_auxiliary_ropes.py": {
        "test_all_that_rotates_takes_the_other_pairing": 4,
    },
    "tests/files/checkpoint/test_programs.py": {
        "test_there_and_back_is_the_same_bit_for_bit": 8,
    },
    "tests/files/configs/test_file_keys.py": {
        "test_a_file_of_transformers_4_stays_one": 4,
        "test_an_extended_file_is_read_alike_by_older_programs": 5,
    },
    "tests/files/configs/test_mutations.py": {
        "test_no_changed_key_of_any_published_file_is_silently_another_rotation": 2,
    },
    "tests/files/test_budget.py": {
        "test_no_file_takes_more_than_it_holds": 8,
    },
    "tests/files/translation/test_over_files.py": {
        "test_classes_of_transformers_read_the_file_as_if_it_had_had_no_rope": 2,
        "test_nothing_is_left_of_a_published_file": 5,
    },
    "tests/files/translation/test_translate.py": {
        "test_a_program_given_this_turns_as_the_model_does": 283,
    },
    "tests/gpu/test_code.py": {
        "test_every_access_is_16_bytes_wide": 3,
        "test_registers_hold_what_a_tile_needs": 3,
    },
    "tests/gpu/test_triton.py": {
        "test_every_head_has_rows_of_its_own": 3,
        "test_every_layout_turns_as_complex_numbers_do": 8,
        "test_every_pair_follows_its_own_axis": 8,
        "test_every_width_is_right": 12,
        "test_explicit_rows_turn_as_they_say": 2,
        "test_integers_of_every_width_are_read": 3,
    },
    "tests/identification/test_doors.py": {
        "test_an_axis_that_is_scaled_is_named_at_every_door": 6,
        "test_an_offset_is_one_offset_and_one_end_of_the_table_at_every_door": 3,
        "test_two_functions_differ_by_the_same_name_whichever_comes_first": 12,
    },
    "tests/identification/test_foreign.py": {
        "test_jax_in_bfloat16_loses_positions": 0,
    },
    "tests/identification/test_matrix.py": {
        "test_a_defect_has_one_name_at_every_door": 74,
    },
    "tests/identification/test_precision.py": {
        "test_law_and_mistake_are_both_named": 54,
    },
    "tests/identification/test_random.py": {
        "test_a_base_is_named_with_the_digits_that_were_measured": 10,
        "test_two_thousand_random_ropes_are_named_right_or_not_at_all": 0,
    },
    "tests/jax/test_transforms.py": {
        "test_a_compiled_function_is_small_and_the_same_everywhere": 9,
        "test_gradients_turn_back_in_every_dtype": 4,
    },
    "tests/jax/test_values.py": {
        "test_every_frequency_turns_at_its_own_rate": 5,
        "test_every_layout_turns_as_complex_numbers_do": 16,
    },
    "tests/papers/test_bases.py": {
        "test_safe_bases_are_the_known_ones": 1,
        "test_two_digits_of_a_base_are_too_few": 7,
    },
    "tests/papers/test_heads_attention.py": {
        "test_every_law_gives_the_exact_weight": 12,
        "test_the_alpha_of_a_model_is_enough_and_no_more": 5,
    },
    "tests/test_angles.py": {
        "test_every_law_is_exact_at_every_int64": 18,
    },
    "tests/test_packaging.py": {
        "test_the_wheel_of_the_archive_holds_everything_and_runs": 0,
    },
    "tests/test_pairings.py": {
        "test_the_type_checker_names_every_place_that_has_to_say_something": 0,
    },
    "tests/test_copied_pages.py": {
        "test_a_copied_page_runs_in_a_fresh_process": 2,
    },
    "tests/tools/test_verdicts.py": {
        "test_every_architecture_is_described_rightly": 2,
    },
    "tests/torch/compile/test_attention.py": {
        "test_a_decode_step_is_one_graph_for_every_length_of_the_cache": 1,
        "test_inductor_makes_one_graph_of_the_operator_and_two_of_operations": 1,
        "test_a_windowed_layer_has_a_graph_for_every_512_tokens": 0,
        "test_inductor_trains_in_one_graph_from_length_2_and_one_for_1": 0,
        "test_without_the_setting_a_length_of_1_is_a_second_graph": 0,
    },
    "tests/torch/compile/test_compile.py": {
        "test_a_training_step_compiles": 3,
        "test_every_verb_compiles_to_eagers_values": 10,
        "test_one_graph_serves_every_length": 3,
    },
    "tests/torch/compile/test_compiled_transforms.py": {
        "test_a_compiled_transform_is_the_transform": 3,
        "test_forward_mode_is_compiled": 1,
    },
    "tests/torch/compile/test_inductor.py": {
        "test_a_graph_kept_on_disk_is_found_again_under_the_same_rule_only": 0,
        "test_any_strides_are_right_and_kept": 2,
        "test_queries_keys_rows_axes_and_writes_are_right": 1,
        "test_the_rule_chooses_by_pairing_and_size_and_can_be_asked": 4,
        "test_values_and_gradients_are_right_at_every_position": 2,
    },
    "tests/torch/compile/test_refusals.py": {
        "test_a_refusal_keeps_its_text_in_a_full_graph": 46,
    },
    "tests/torch/compile/test_ropes.py": {
        "test_a_rope_made_inside_rotates_as_outside": 5,
        "test_a_rule_and_a_length_may_both_be_arguments": 1,
        "test_inductor_compiles_it_too": 0,
    },
    "tests/torch/distributed/test_distributed.py": {
        "test_rows_by_head_are_cut_where_heads_are": 4,
    },
    "tests/torch/distributed/test_processes.py": {
        "test_every_way_of_sharing_out_gives_the_losses_of_one_process": 1,
        "test_mixed_precision_on_several_processes_is_that_on_one": 0,
        "test_the_example_trains_under_torchrun": 0,
    },
    "tests/torch/export/test_export.py": {
        "test_aot_inductor_compiles_attention_for_another_process": 0,
    },
    "tests/torch/export/test_lengths.py": {
        "test_a_program_of_bounded_length_runs_at_every_length": 11,
        "test_an_onnx_file_runs_at_every_length": 3,
    },
    "tests/torch/export/test_onnx.py": {
        "test_every_layout_becomes_the_standards_operator": 4,
        "test_positions_broadcast_against_any_leading_dimensions": 2,
    },
    "tests/torch/export/test_plain_graph.py": {
        "test_an_exported_program_of_plain_operations_needs_no_phasor": 1,
        "test_named_to_a_compiler_every_verb_is_plain_operations": 4,
        "test_plain_operations_in_a_graph_rotate": 4,
    },
    "tests/torch/export/test_portable.py": {
        "test_a_graph_in_float16_is_as_right_far_out_as_near": 2,
        "test_every_engine_turns_alike_at_far_positions": 2,
        "test_no_graph_holds_what_engines_narrow_or_refuse": 3,
    },
    "tests/torch/export/test_runtimes.py": {
        "test_openvino_reads_torchs_program": 1,
    },
    "tests/torch/kv_cache/test_cached_keys_failing.py": {
        "test_an_edit_that_runs_out_of_memory_anywhere_writes_nothing": 6,
    },
    "tests/torch/kv_cache/test_kv_cache.py": {
        "test_decoding_is_the_full_forward_pass": 16,
        "test_rows_may_grow_from_different_lengths": 8,
    },
    "tests/torch/live/test_defects.py": {
        "test_a_rule_compiles": 1,
    },
    "tests/torch/live/test_exported.py": {
        "test_a_patched_model_is_exported": 2,
        "test_a_patched_model_says_the_same_in_every_engine_at_every_length": 1,
    },
    "tests/torch/live/test_lost.py": {
        "test_frequencies_that_nobody_wrote_are_repaired": 8,
    },
    "tests/torch/live/test_patch.py": {
        "test_a_patched_model_compiles_whole": 2,
        "test_a_patched_model_says_the_same_in_float32": 12,
        "test_every_architecture_of_the_installed_transformers": 1,
        "test_every_model_of_several_parts_is_patched_or_refused_by_name": 1,
        "test_no_architecture_passes_with_another_rope": 3,
    },
    "tests/torch/operator/test_eager.py": {
        "test_few_and_many_elements_are_turned_as_the_oracle_says": 12,
    },
    "tests/torch/papers/test_heads.py": {
        "test_the_promise_holds_but_for_the_rounding_of_biases": 14,
    },
    "tests/torch/test_attention.py": {
        "test_packed_sequences_are_separate_ones": 14,
        "test_padded_rows_are_unpadded_ones": 14,
    },
    "tests/torch/test_attention_module.py": {
        "test_every_mask_compiles_to_one_graph": 5,
    },
    "tests/torch/test_linear_attention.py": {
        "test_it_is_the_quadratic_form": 5,
    },
    "tests/torch/test_linear_attention_training.py": {
        "test_one_input_may_want_a_gradient": 1,
    },
    "tests/torch/test_relative.py": {
        "test_attention_is_its_definition_on_all_pairs": 16,
    },
    "tests/torch/test_rotary_embedding.py": {
        "test_a_compiler_sees_one_graph": 4,
    },
    "tests/verify/test_misplaced.py": {
        "test_an_offset_of_any_size_is_an_offset": 3,
    },
    "tests/verify/test_named.py": {
        "test_differences_are_named_all_of_them_and_by_their_causes": 4,
    },
    "tests/verify/test_random.py": {
        "test_none_of_many_that_rotate_as_the_rope_says_raises_an_alarm": 1,
        "test_one_or_two_differences_of_many_recordings_are_named": 1,
    },
}
