"""The catalogue of the codes that NVIDIA's driver (Xid) and NVSwitch's driver (SXid) write into the kernel log: data.

Codes and names are those of the open driver 595.45.04 (up to 176). The vendor's immediate action is that of its Xid
catalogue as of 2025-10-29 (``WORKFLOW_``: the vendor tells apart by further lines; empty: newer than that catalogue).
The classes are ours: what a training job has to do about it. The meanings are in our own words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = [
    "CLASS_ADVICE",
    "OFF_THE_BUS",
    "RECOVERY_ACTION",
    "RECOVERY_CLASSES",
    "SXIDS",
    "XIDS",
    "Sxid",
    "Xid",
    "XidClass",
    "sxid_entry",
    "xid_entry",
]


class XidClass(str, Enum):
    """What a code asks of the job and the node.

    ``follow``: what follows from another code, or details of it. ``unknown``: a code newer than the catalogue.
    """

    APP = "app"
    INFO = "info"
    FOLLOW = "follow"
    SOFTWARE = "software"
    RESET = "reset"
    FABRIC = "fabric"
    REBOOT = "reboot"
    HARDWARE = "hardware"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Xid:
    """One code. ``name`` is the driver's, ``vendor_action`` the vendor's catalogue's; both empty for unknown codes."""

    code: int
    name: str
    cls: XidClass
    vendor_action: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Sxid:
    """One code of NVSwitch.

    ``is_always_fatal``, ``is_harmless``: to the whole fabric, or may be ignored, in the vendor's words, whatever the
    line says.
    """

    code: int
    meaning: str
    is_always_fatal: bool = False
    is_harmless: bool = False


OFF_THE_BUS: Final = 79
RECOVERY_ACTION: Final = 154

CLASS_ADVICE: Final[Mapping[XidClass, tuple[str, ...]]] = {
    XidClass.APP: ("restart the job; look at its last kernels with CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer",),
    XidClass.INFO: (),
    XidClass.FOLLOW: ("look at the Xid before it",),
    XidClass.SOFTWARE: ("update the driver or the firmware",),
    XidClass.RESET: ("stop the ranks of this GPU, then nvidia-smi --gpu-reset",),
    XidClass.FABRIC: ("reset the GPU and look at its peer and the switch", "on a repeat leave out the node"),
    XidClass.REBOOT: ("leave out the node and reboot it",),
    XidClass.HARDWARE: ("leave out the node and have the GPU inspected or replaced",),
    XidClass.UNKNOWN: ("reset the GPU; on a repeat leave out the node", "look the code up in the vendor's catalogue"),
}

# What NVML and Xid 154 call the recovery action, and what that makes of the GPU.
RECOVERY_CLASSES: Final[Mapping[int, XidClass]] = {
    0: XidClass.INFO,  # none
    1: XidClass.RESET,
    2: XidClass.REBOOT,
    3: XidClass.FABRIC,  # drain peer to peer
    4: XidClass.RESET,  # drain and reset
}

_ROWS: Final[tuple[tuple[int, str, XidClass, str, str], ...]] = (
    (
        8,
        "FIFO_ERROR_IDLE_TIMEOUT",
        XidClass.APP,
        "RESTART_APP",
        "a channel of the program did not come to rest in time",
    ),
    (
        11,
        "GR_ERROR_MISSING_HW",
        XidClass.APP,
        "RESTART_APP",
        "the program used a graphics method that the engine does not know",
    ),
    (
        13,
        "ROBUST_CHANNEL_GR_EXCEPTION",
        XidClass.APP,
        "RESTART_APP",
        "a kernel of the program raised an exception: a bad address or instruction, seldom a bad chip",
    ),
    (
        16,
        "ROBUST_CHANNEL_VBLANK_CALLBACK_TIMEOUT",
        XidClass.INFO,
        "CONTACT_SUPPORT",
        "the display's refresh did not come in time",
    ),
    (25, "GR_ILLEGAL_NOTIFY", XidClass.APP, "RESTART_APP", "the program asked for a notification at an invalid place"),
    (
        31,
        "ROBUST_CHANNEL_FIFO_ERROR_MMU_ERR_FLT",
        XidClass.APP,
        "RESTART_APP",
        "a kernel or copy of the program touched an address that is not mapped",
    ),
    (
        32,
        "ROBUST_CHANNEL_PBDMA_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "a command that the program put into its queue is broken",
    ),
    (
        37,
        "FECS_ERR_UNIMP_FIRMWARE_METHOD",
        XidClass.INFO,
        "IGNORE",
        "the engine's scheduler has no such function in its firmware",
    ),
    (
        38,
        "FECS_ERR_WATCHDOG_TIMEOUT",
        XidClass.INFO,
        "IGNORE",
        "the engine's scheduler stopped answering and was started again",
    ),
    (39, "ROBUST_CHANNEL_CE0_ERROR", XidClass.APP, "RESTART_APP", "copy engine 0 stopped on an error of the program"),
    (40, "ROBUST_CHANNEL_CE1_ERROR", XidClass.APP, "RESTART_APP", "copy engine 1 stopped on an error of the program"),
    (41, "ROBUST_CHANNEL_CE2_ERROR", XidClass.APP, "RESTART_APP", "copy engine 2 stopped on an error of the program"),
    (
        43,
        "ROBUST_CHANNEL_RESETCHANNEL_VERIF_ERROR",
        XidClass.APP,
        "IGNORE",
        "the program's channel was stopped after an error of its own; the GPU is fine",
    ),
    (
        44,
        "ROBUST_CHANNEL_GR_FAULT_DURING_CTXSW",
        XidClass.RESET,
        "IGNORE",
        "the engine failed while it changed from one program to another",
    ),
    (
        45,
        "ROBUST_CHANNEL_PREEMPTIVE_REMOVAL",
        XidClass.FOLLOW,
        "WORKFLOW_XID_45",
        "the channels of a program were torn down: it was ended, or another fault came first",
    ),
    (46, "GPU_TIMEOUT_ERROR", XidClass.RESET, "RESET_GPU", "the GPU stopped answering the driver in time"),
    (
        48,
        "ROBUST_CHANNEL_GPU_ECC_DBE",
        XidClass.RESET,
        "WORKFLOW_XID_48",
        "a memory error that ECC can find but not correct",
    ),
    (
        54,
        "SILENT_RUNNING_PWR_REDUCED_CLOCKING",
        XidClass.HARDWARE,
        "CHECK_MECHANICALS",
        "auxiliary power is missing or too weak: the clocks are held down",
    ),
    (56, "DISPLAY_CHANNEL_EXCEPTION", XidClass.INFO, "CONTACT_SUPPORT", "the display engine raised an exception"),
    (
        57,
        "FB_LINK_TRAINING_FAILURE_ERROR",
        XidClass.HARDWARE,
        "CONTACT_SUPPORT",
        "the link to the GPU's memory could not be trained",
    ),
    (58, "FB_MEMORY_ERROR", XidClass.HARDWARE, "CONTACT_SUPPORT", "the memory interface of the GPU made an error"),
    (
        60,
        "ROBUST_CHANNEL_SEC2_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "the video security engine stopped on an error of the program",
    ),
    (
        61,
        "PMU_BREAKPOINT",
        XidClass.RESET,
        "CONTACT_SUPPORT",
        "the power controller of the GPU stopped at an internal breakpoint",
    ),
    (62, "PMU_HALT_ERROR", XidClass.RESET, "RESET_GPU", "the power controller of the GPU has halted"),
    (
        63,
        "INFOROM_PAGE_RETIREMENT_EVENT",
        XidClass.INFO,
        "IGNORE",
        "a bad memory row was written down for replacement, which happens at the next reset",
    ),
    (
        64,
        "INFOROM_PAGE_RETIREMENT_FAILURE",
        XidClass.HARDWARE,
        "RESET_GPU",
        "a bad memory row could not be written down for replacement",
    ),
    (
        65,
        "ROBUST_CHANNEL_NVENC1_ERROR",
        XidClass.APP,
        "CONTACT_SUPPORT",
        "video encoder 1 stopped on an error of the program",
    ),
    (
        66,
        "FECS_ERR_REG_ACCESS_VIOLATION",
        XidClass.SOFTWARE,
        "IGNORE",
        "the driver touched a register that the scheduler does not allow",
    ),
    (
        67,
        "FECS_ERR_VERIF_VIOLATION",
        XidClass.SOFTWARE,
        "IGNORE",
        "the scheduler found a violation in what the driver asked",
    ),
    (
        68,
        "ROBUST_CHANNEL_NVDEC0_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "video decoder 0 stopped on an error of the program",
    ),
    (
        69,
        "ROBUST_CHANNEL_GR_CLASS_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "the program gave the graphics engine a class it does not know",
    ),
    (70, "ROBUST_CHANNEL_CE3_ERROR", XidClass.APP, "RESTART_APP", "copy engine 3 stopped on an error of the program"),
    (71, "ROBUST_CHANNEL_CE4_ERROR", XidClass.APP, "RESTART_APP", "copy engine 4 stopped on an error of the program"),
    (72, "ROBUST_CHANNEL_CE5_ERROR", XidClass.APP, "RESTART_APP", "copy engine 5 stopped on an error of the program"),
    (
        74,
        "NVLINK_ERROR",
        XidClass.FABRIC,
        "WORKFLOW_NVLINK_ERR",
        "an NVLink of the GPU made an error, here or at its peer",
    ),
    (75, "ROBUST_CHANNEL_CE6_ERROR", XidClass.APP, "RESTART_APP", "copy engine 6 stopped on an error of the program"),
    (76, "ROBUST_CHANNEL_CE7_ERROR", XidClass.APP, "RESTART_APP", "copy engine 7 stopped on an error of the program"),
    (77, "ROBUST_CHANNEL_CE8_ERROR", XidClass.APP, "RESTART_APP", "copy engine 8 stopped on an error of the program"),
    (78, "VGPU_START_ERROR", XidClass.SOFTWARE, "UPDATE_SWFW", "a virtual GPU could not be started"),
    (
        79,
        "ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS",
        XidClass.REBOOT,
        "RESTART_BM",
        "the GPU does not answer on the PCIe bus any more",
    ),
    (
        80,
        "PBDMA_PUSHBUFFER_CRC_MISMATCH",
        XidClass.APP,
        "RESTART_APP",
        "a command in the program's queue arrived changed",
    ),
    (81, "ROBUST_CHANNEL_VGA_SUBSYSTEM_ERROR", XidClass.INFO, "CONTACT_SUPPORT", "the VGA part made an error"),
    (
        82,
        "ROBUST_CHANNEL_NVJPG0_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "JPEG decoder 0 stopped on an error of the program",
    ),
    (
        83,
        "ROBUST_CHANNEL_NVDEC1_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "video decoder 1 stopped on an error of the program",
    ),
    (
        84,
        "ROBUST_CHANNEL_NVDEC2_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "video decoder 2 stopped on an error of the program",
    ),
    (85, "ROBUST_CHANNEL_CE9_ERROR", XidClass.APP, "RESTART_APP", "copy engine 9 stopped on an error of the program"),
    (
        86,
        "ROBUST_CHANNEL_OFA0_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "optical flow engine 0 stopped on an error of the program",
    ),
    (
        88,
        "ROBUST_CHANNEL_NVDEC3_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "video decoder 3 stopped on an error of the program",
    ),
    (
        89,
        "ROBUST_CHANNEL_NVDEC4_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "video decoder 4 stopped on an error of the program",
    ),
    (
        92,
        "EXCESSIVE_SBE_INTERRUPTS",
        XidClass.INFO,
        "IGNORE",
        "single-bit memory errors come often; each one is corrected",
    ),
    (
        93,
        "INFOROM_ERASE_LIMIT_EXCEEDED",
        XidClass.INFO,
        "IGNORE",
        "the board's own storage nears the number of writes it bears",
    ),
    (
        94,
        "ROBUST_CHANNEL_CONTAINED_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "an uncorrectable memory error was confined to one program; the others may go on",
    ),
    (
        95,
        "ROBUST_CHANNEL_UNCONTAINED_ERROR",
        XidClass.RESET,
        "RESET_GPU",
        "an uncorrectable memory error could not be confined: nothing on the GPU can be trusted",
    ),
    (
        96,
        "ROBUST_CHANNEL_NVDEC5_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "video decoder 5 stopped on an error of the program",
    ),
    (
        97,
        "ROBUST_CHANNEL_NVDEC6_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "video decoder 6 stopped on an error of the program",
    ),
    (
        98,
        "ROBUST_CHANNEL_NVDEC7_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "video decoder 7 stopped on an error of the program",
    ),
    (
        99,
        "ROBUST_CHANNEL_NVJPG1_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "JPEG decoder 1 stopped on an error of the program",
    ),
    (
        100,
        "ROBUST_CHANNEL_NVJPG2_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "JPEG decoder 2 stopped on an error of the program",
    ),
    (
        101,
        "ROBUST_CHANNEL_NVJPG3_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "JPEG decoder 3 stopped on an error of the program",
    ),
    (
        102,
        "ROBUST_CHANNEL_NVJPG4_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "JPEG decoder 4 stopped on an error of the program",
    ),
    (
        103,
        "ROBUST_CHANNEL_NVJPG5_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "JPEG decoder 5 stopped on an error of the program",
    ),
    (
        104,
        "ROBUST_CHANNEL_NVJPG6_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "JPEG decoder 6 stopped on an error of the program",
    ),
    (
        105,
        "ROBUST_CHANNEL_NVJPG7_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "JPEG decoder 7 stopped on an error of the program",
    ),
    (106, "SMBPBI_TEST_MESSAGE", XidClass.INFO, "IGNORE", "a test message of the board's management"),
    (107, "SMBPBI_TEST_MESSAGE_SILENT", XidClass.INFO, "IGNORE", "a silent test message of the board's management"),
    (
        109,
        "CTXSW_TIMEOUT_ERROR",
        XidClass.RESET,
        "RESET_GPU",
        "the engine did not leave a program in time when another was due",
    ),
    (110, "SEC_FAULT_ERROR", XidClass.RESET, "RESET_GPU", "the security processor raised a fault"),
    (
        119,
        "GSP_RPC_TIMEOUT",
        XidClass.RESET,
        "RESET_GPU",
        "the GPU's system processor did not answer the driver; NVML may hang as well",
    ),
    (120, "GSP_ERROR", XidClass.RESET, "RESET_GPU", "the GPU's system processor failed"),
    (121, "C2C_ERROR", XidClass.FABRIC, "IGNORE", "the chip-to-chip link made an error that was corrected"),
    (
        122,
        "SPI_PMU_RPC_READ_FAIL",
        XidClass.HARDWARE,
        "CONTACT_SUPPORT",
        "the power controller could not read the board's flash",
    ),
    (
        123,
        "SPI_PMU_RPC_WRITE_FAIL",
        XidClass.HARDWARE,
        "CONTACT_SUPPORT",
        "the power controller could not write the board's flash",
    ),
    (
        124,
        "SPI_PMU_RPC_ERASE_FAIL",
        XidClass.HARDWARE,
        "CONTACT_SUPPORT",
        "the power controller could not erase the board's flash",
    ),
    (125, "INFOROM_FS_ERROR", XidClass.HARDWARE, "CONTACT_SUPPORT", "the file system in the board's storage is broken"),
    (
        126,
        "ROBUST_CHANNEL_CE10_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "copy engine 10 stopped on an error of the program",
    ),
    (
        127,
        "ROBUST_CHANNEL_CE11_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "copy engine 11 stopped on an error of the program",
    ),
    (
        128,
        "ROBUST_CHANNEL_CE12_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "copy engine 12 stopped on an error of the program",
    ),
    (
        129,
        "ROBUST_CHANNEL_CE13_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "copy engine 13 stopped on an error of the program",
    ),
    (
        130,
        "ROBUST_CHANNEL_CE14_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "copy engine 14 stopped on an error of the program",
    ),
    (
        131,
        "ROBUST_CHANNEL_CE15_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "copy engine 15 stopped on an error of the program",
    ),
    (
        132,
        "ROBUST_CHANNEL_CE16_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "copy engine 16 stopped on an error of the program",
    ),
    (
        133,
        "ROBUST_CHANNEL_CE17_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "copy engine 17 stopped on an error of the program",
    ),
    (
        134,
        "ROBUST_CHANNEL_CE18_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "copy engine 18 stopped on an error of the program",
    ),
    (
        135,
        "ROBUST_CHANNEL_CE19_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "copy engine 19 stopped on an error of the program",
    ),
    (136, "ALI_TRAINING_FAIL", XidClass.FABRIC, "RESET_GPU", "NVLinks could not be trained"),
    (137, "NVLINK_PRIV_ERR", XidClass.FABRIC, "IGNORE", "a peer's access over NVLink was refused or failed"),
    (
        139,
        "ROBUST_CHANNEL_OFA1_ERROR",
        XidClass.APP,
        "RESTART_APP",
        "optical flow engine 1 stopped on an error of the program",
    ),
    (
        140,
        "UNRECOVERABLE_ECC_ERROR_ESCAPE",
        XidClass.RESET,
        "RESET_GPU",
        "an uncorrectable memory error got past the usual handling",
    ),
    (141, "ROBUST_CHANNEL_FAST_PATH_ERROR", XidClass.INFO, "IGNORE", "the fast path of a channel made an error"),
    (
        142,
        "ROBUST_CHANNEL_NVENC3_ERROR",
        XidClass.APP,
        "CONTACT_SUPPORT",
        "video encoder 3 stopped on an error of the program",
    ),
    (143, "GPU_INIT_ERROR", XidClass.HARDWARE, "RESET_GPU", "the GPU could not be initialised"),
    (144, "NVLINK_SAW_ERROR", XidClass.FABRIC, "WORKFLOW_NVLINK5_ERR", "NVLink: an error in the unit SAW"),
    (145, "NVLINK_RLW_ERROR", XidClass.FABRIC, "WORKFLOW_NVLINK5_ERR", "NVLink: an error in the unit RLW"),
    (146, "NVLINK_TLW_ERROR", XidClass.FABRIC, "WORKFLOW_NVLINK5_ERR", "NVLink: an error in the unit TLW"),
    (147, "NVLINK_TREX_ERROR", XidClass.FABRIC, "WORKFLOW_NVLINK5_ERR", "NVLink: an error in the unit TREX"),
    (
        148,
        "NVLINK_NVLPW_CTRL_ERROR",
        XidClass.FABRIC,
        "WORKFLOW_NVLINK5_ERR",
        "NVLink: an error in the control of the link's power",
    ),
    (
        149,
        "NVLINK_NETIR_ERROR",
        XidClass.FABRIC,
        "WORKFLOW_NVLINK5_ERR",
        "NVLink: an error in the network interface of the link",
    ),
    (150, "NVLINK_MSE_ERROR", XidClass.FABRIC, "WORKFLOW_NVLINK5_ERR", "NVLink: an error in the unit MSE"),
    (
        151,
        "ROBUST_CHANNEL_KEY_ROTATION_ERROR",
        XidClass.REBOOT,
        "RESTART_VM",
        "the keys of confidential computing could not be changed",
    ),
    (152, "RESERVED7_ERROR", XidClass.INFO, "IGNORE", "reserved by the driver"),
    (153, "RESERVED8_ERROR", XidClass.INFO, "IGNORE", "reserved by the driver"),
    (
        154,
        "GPU_RECOVERY_ACTION_CHANGED",
        XidClass.FOLLOW,
        "XID_154",
        "the driver has changed its mind about what the GPU needs; the text says to what",
    ),
    (
        155,
        "NVLINK_SW_DEFINED_ERROR",
        XidClass.FABRIC,
        "RESET_GPU",
        "an NVLink went down or failed in the driver's own judgement",
    ),
    (156, "RESOURCE_RETIREMENT_EVENT", XidClass.RESET, "RESET_GPU", "a part of the GPU was retired"),
    (157, "RESOURCE_RETIREMENT_FAILURE", XidClass.HARDWARE, "IGNORE", "a part of the GPU could not be retired"),
    (158, "GPU_FATAL_TIMEOUT", XidClass.RESET, "RESET_GPU", "the GPU did not answer in time, for good"),
    (
        159,
        "ROBUST_CHANNEL_CHI_NON_DATA_ERROR",
        XidClass.APP,
        "CHECK_UVM",
        "an error on the coherent interface that hit no data",
    ),
    (160, "CHANNEL_RETIREMENT_EVENT", XidClass.INFO, "IGNORE", "a memory channel was retired"),
    (161, "CHANNEL_RETIREMENT_FAILURE", XidClass.INFO, "IGNORE", "a memory channel could not be retired"),
    (162, "ISINK_REENGAGED", XidClass.INFO, "", "the circuit that smooths the power draw works again"),
    (163, "ISINK_DISENGAGED", XidClass.HARDWARE, "", "the circuit that smooths the power draw is off"),
    (164, "ISINK_LOW_LIFETIME", XidClass.INFO, "", "the circuit that smooths the power draw has little life left"),
    (165, "ISINK_ZERO_LIFETIME", XidClass.HARDWARE, "", "the circuit that smooths the power draw has no life left"),
    (166, "NVLINK_SECURE_NVLE_ERROR", XidClass.FABRIC, "", "NVLink: encryption of the link failed"),
    (167, "PCIE_FATAL_TIMEOUT", XidClass.REBOOT, "", "PCIe: a request was not answered in time, for good"),
    (168, "REDUCED_GPU_MEMORY_CAPACITY", XidClass.HARDWARE, "", "the GPU has less memory than it should"),
    (169, "SEC2_HALT_ERROR", XidClass.RESET, "", "the security processor has halted"),
    (170, "NVLINK_SECURE_ERROR", XidClass.FABRIC, "", "NVLink: an error on a protected link"),
    (171, "UNCORRECTABLE_DRAM_ERROR", XidClass.FOLLOW, "", "details of a memory error: it lies in the DRAM"),
    (172, "UNCORRECTABLE_SRAM_ERROR", XidClass.FOLLOW, "", "details of a memory error: it lies in the SRAM"),
    (173, "C2C_FATAL_LINK_FAILURE", XidClass.FABRIC, "", "the chip-to-chip link has failed"),
    (
        174,
        "ROBUST_CHANNEL_RESETCHANNEL_KILL_PROCESS_SILENT",
        XidClass.APP,
        "",
        "the program is ended without a message, after an error of its own",
    ),
    (175, "MEMORY_SUBSYSTEM_ERROR", XidClass.RESET, "", "the memory subsystem made an error"),
    (176, "PCIE_CORRECTABLE_ERROR_FAULT", XidClass.INFO, "", "PCIe: errors that were corrected"),
)

XIDS: Final[Mapping[int, Xid]] = {row[0]: Xid(*row) for row in _ROWS}


# Facts of NVIDIA's fabric manager guide 1.3 (October 2023), appendix D. The lines themselves say whether an error is
# fatal; here is what that does not tell.
_CORRECTED: Final = (11012, 11021, 11022, 11023, 12021, 12023, 15008, 15011, 19049, 19055, 19057, 19059, 19062, 19065)
_CORRECTED_TOO: Final = (19068, 19071, 24001, 24002, 24003)
_WHOLE_FABRIC: Final = tuple(range(23005, 23018))

_NOTABLE: Final[tuple[Sxid, ...]] = (
    Sxid(10001, "an access to the switch's registers was refused; fatal errors may follow"),
    Sxid(10002, "an access to the switch's registers timed out; fatal errors may follow"),
    Sxid(10003, "an interrupt that nothing handles; the whole fabric needs a reset", True),
    Sxid(10004, "the switch is too hot and may run its links with fewer lanes"),
    Sxid(10005, "the switch is cool enough again", is_harmless=True),
    Sxid(11004, "traffic of a GPU hit a route that its partition does not have; that GPU's NVLink traffic stalls"),
    Sxid(12028, "a request was refused on its way out of the switch; that GPU's NVLink traffic stalls"),
    Sxid(19084, "the heartbeat of a link stopped; a fatal error mostly comes with it"),
    Sxid(20001, "a packet was sent again; the link may be slower"),
    Sxid(20012, "a link is broken, or its other end was shut down first"),
    Sxid(20034, "the training of a link failed: it is down"),
    Sxid(22013, "the controller of a link asked for service", is_harmless=True),
)

SXIDS: Final[Mapping[int, Sxid]] = {
    **{c: Sxid(c, "a memory error inside the switch was corrected", is_harmless=True) for c in _CORRECTED},
    **{c: Sxid(c, "a memory error inside the switch was corrected", is_harmless=True) for c in _CORRECTED_TOO},
    **{c: Sxid(c, "the packet logic of the switch failed; the host must restart", True) for c in _WHOLE_FABRIC},
    **{row.code: row for row in _NOTABLE},
}


def xid_entry(code: int) -> Xid:
    """The catalogue's entry, or one of class *unknown*."""
    return XIDS.get(code) or Xid(code, "", XidClass.UNKNOWN, "", "a code that is not in the catalogue")


def sxid_entry(code: int) -> Sxid:
    """The catalogue's entry, or one without a meaning of its own."""
    return SXIDS.get(code) or Sxid(code, "an error of the switch; the line says which")
