//! Types of the C interface: handles, and structs with their layout.

/// A field of a struct.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// Its C type; arrays as `char[16]`.
    pub kind: &'static str,
    /// Where it begins, in bytes.
    pub offset: usize,
    /// Its size in bytes.
    pub size: usize,
}

/// A struct or a union.
#[derive(Debug, Clone, Copy)]
pub struct Struct {
    /// Its name.
    pub name: &'static str,
    /// Whether it is a union.
    pub union: bool,
    /// Its size in bytes.
    pub size: usize,
    /// Its alignment in bytes.
    pub align: usize,
    /// Its fields.
    pub fields: &'static [Field],
}

const fn field(name: &'static str, kind: &'static str, offset: usize, size: usize) -> Field {
    Field { name, kind, offset, size }
}

/// Types that are pointers or numbers, with what they stand for.
pub const HANDLES: &[(&str, &str)] = &[
    ("aclrtStream", "void *"),
    ("aclrtEvent", "void *"),
    ("aclrtContext", "void *"),
    ("aclrtNotify", "void *"),
    ("aclrtMbuf", "void *"),
    ("aclrtAllocatorDesc", "void *"),
    ("aclrtAllocator", "void *"),
    ("aclrtTaskGrp", "void *"),
    ("aclError", "int"),
    ("aclrtDrvMemHandle", "void *"),
    ("aclrtBinHandle", "void *"),
    ("aclrtFuncHandle", "void *"),
    ("aclrtArgsHandle", "void *"),
    ("aclrtParamHandle", "void *"),
    ("aclmdlRI", "void *"),
    ("aclmdlRICondHandle", "void *"),
    ("aclrtCallback", "void (*)(void *)"),
    ("aclrtHostFunc", "void (*)(void *)"),
    ("aclrtMemPool", "void *"),
    ("aclrtAllocatorAllocFunc", "void (*)(void)"),
    ("aclrtAllocatorFreeFunc", "void (*)(void)"),
    ("aclrtAllocatorAllocAdviseFunc", "void (*)(void)"),
    ("aclrtAllocatorGetAddrFromBlockFunc", "void (*)(void)"),
    ("aclrtExceptionInfoCallback", "void (*)(void *)"),
    ("ProfCommandHandle", "int32_t (*)(uint32_t, void *, uint32_t)"),
    ("aclmdlRICondHandleFlag", "int"),
    ("aclprofAicoreMetrics", "int"),
    ("aclprofStepTag", "int"),
    ("aclrtErrorType", "int"),
];

/// Structs that programs only point to.
pub const OPAQUE: &[&str] = &[
    "aclDataBuffer",
    "aclprofConfig",
    "aclprofAicoreEvents",
    "aclprofStepInfo",
    "aclTensorDesc",
    "aclopAttr",
    "aclGraphDumpOption",
    "MsprofApi",
    "aclmdlRICondTaskParams",
    "aclrtBinaryLoadOptions",
    "aclrtLaunchKernelCfg",
    "aclrtUtilizationExtendInfo",
];

/// All structs, each after those that it contains.
pub const STRUCTS: &[Struct] = &[
    Struct {
        name: "aclCANNPackageVersion",
        union: false,
        size: 512,
        align: 1,
        fields: &[
            field("version", "char[ACL_PKG_VERSION_MAX_SIZE]", 0, 128),
            field("majorVersion", "char[ACL_PKG_VERSION_PARTS_MAX_SIZE]", 128, 64),
            field("minorVersion", "char[ACL_PKG_VERSION_PARTS_MAX_SIZE]", 192, 64),
            field("releaseVersion", "char[ACL_PKG_VERSION_PARTS_MAX_SIZE]", 256, 64),
            field("patchVersion", "char[ACL_PKG_VERSION_PARTS_MAX_SIZE]", 320, 64),
            field("reserved", "char[ACL_PKG_VERSION_MAX_SIZE]", 384, 128),
        ],
    },
    Struct {
        name: "aclrtMallocAttrValue",
        union: true,
        size: 8,
        align: 4,
        fields: &[
            field("moduleId", "uint16_t", 0, 2),
            field("deviceId", "uint32_t", 0, 4),
            field("vaFlag", "uint32_t", 0, 4),
            field("rsv", "uint8_t[8]", 0, 8),
        ],
    },
    Struct {
        name: "aclrtMallocAttribute",
        union: false,
        size: 12,
        align: 4,
        fields: &[field("attr", "aclrtMallocAttrType", 0, 4), field("value", "aclrtMallocAttrValue", 4, 8)],
    },
    Struct {
        name: "aclrtMallocConfig",
        union: false,
        size: 16,
        align: 8,
        fields: &[field("attrs", "aclrtMallocAttribute *", 0, 8), field("numAttrs", "size_t", 8, 8)],
    },
    Struct {
        name: "aclrtMemLocation",
        union: false,
        size: 8,
        align: 4,
        fields: &[field("id", "uint32_t", 0, 4), field("type", "aclrtMemLocationType", 4, 4)],
    },
    Struct {
        name: "aclrtMemAccessDesc",
        union: false,
        size: 24,
        align: 4,
        fields: &[
            field("flags", "aclrtMemAccessFlags", 0, 4),
            field("location", "aclrtMemLocation", 4, 8),
            field("rsv", "uint8_t[12]", 12, 12),
        ],
    },
    Struct {
        name: "aclrtMemUceInfo",
        union: false,
        size: 128,
        align: 8,
        fields: &[
            field("addr", "void *", 0, 8),
            field("len", "size_t", 8, 8),
            field("reserved", "size_t[UCE_INFO_RESERVED_SIZE]", 16, 112),
        ],
    },
    Struct {
        name: "aclrtMemUsageInfo",
        union: false,
        size: 112,
        align: 8,
        fields: &[
            field("name", "char[32]", 0, 32),
            field("curMemSize", "uint64_t", 32, 8),
            field("memPeakSize", "uint64_t", 40, 8),
            field("reserved", "size_t[8]", 48, 64),
        ],
    },
    Struct {
        name: "aclrtMemcpyBatchAttr",
        union: false,
        size: 32,
        align: 4,
        fields: &[
            field("dstLoc", "aclrtMemLocation", 0, 8),
            field("srcLoc", "aclrtMemLocation", 8, 8),
            field("rsv", "uint8_t[16]", 16, 16),
        ],
    },
    Struct {
        name: "aclrtPhysicalMemProp",
        union: false,
        size: 32,
        align: 8,
        fields: &[
            field("handleType", "aclrtMemHandleType", 0, 4),
            field("allocationType", "aclrtMemAllocationType", 4, 4),
            field("memAttr", "aclrtMemAttr", 8, 4),
            field("location", "aclrtMemLocation", 12, 8),
            field("reserve", "uint64_t", 24, 8),
        ],
    },
    Struct {
        name: "aclrtPtrAttributes",
        union: false,
        size: 28,
        align: 4,
        fields: &[
            field("location", "aclrtMemLocation", 0, 8),
            field("pageSize", "uint32_t", 8, 4),
            field("rsv", "uint32_t[4]", 12, 16),
        ],
    },
    Struct {
        name: "aclrtStreamAttrValue",
        union: true,
        size: 16,
        align: 8,
        fields: &[
            field("failureMode", "uint64_t", 0, 8),
            field("overflowSwitch", "uint32_t", 0, 4),
            field("userCustomTag", "uint32_t", 0, 4),
            field("cacheOpInfoSwitch", "uint32_t", 0, 4),
            field("streamPriority", "uint32_t", 0, 4),
            field("reserve", "uint32_t[4]", 0, 16),
        ],
    },
    Struct {
        name: "aclrtUtilizationInfo",
        union: false,
        size: 24,
        align: 8,
        fields: &[
            field("cubeUtilization", "int32_t", 0, 4),
            field("vectorUtilization", "int32_t", 4, 4),
            field("aicpuUtilization", "int32_t", 8, 4),
            field("memoryUtilization", "int32_t", 12, 4),
            field("utilizationExtend", "aclrtUtilizationExtendInfo *", 16, 8),
        ],
    },
    Struct { name: "aclrtUuid", union: false, size: 16, align: 1, fields: &[field("bytes", "char[16]", 0, 16)] },
    Struct {
        name: "aclrtMemFabricHandle",
        union: false,
        size: 128,
        align: 1,
        fields: &[field("data", "uint8_t[128]", 0, 128)],
    },
    Struct {
        name: "aclrtIpcEventHandle",
        union: false,
        size: 64,
        align: 1,
        fields: &[field("reserved", "char[ACL_IPC_EVENT_HANDLE_SIZE]", 0, 64)],
    },
    Struct {
        name: "aclrtServerPid",
        union: false,
        size: 24,
        align: 8,
        fields: &[field("sdid", "uint32_t", 0, 4), field("pid", "int32_t *", 8, 8), field("num", "size_t", 16, 8)],
    },
    Struct {
        name: "aclrtErrorInfo",
        union: false,
        size: 2576,
        align: 8,
        fields: &[
            field("tryRepair", "uint8_t", 0, 1),
            field("hasDetail", "uint8_t", 1, 1),
            field("reserved", "uint8_t[2]", 2, 2),
            field("errorType", "aclrtErrorType", 4, 4),
            field("detail", "uint64_t[321]", 8, 2568),
        ],
    },
    Struct {
        name: "aclrtMemManagedLocation",
        union: false,
        size: 8,
        align: 4,
        fields: &[field("type", "aclrtMemManagedLocationType", 0, 4), field("id", "int32_t", 4, 4)],
    },
];
